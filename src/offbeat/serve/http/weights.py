"""Files of weights over HTTP: sent in ranges, received as drafts.

A trainer's files go into the draft of their version, each written beside its place, checked against its digest, flushed
and renamed. The draft takes the version's place when the version is published, just before its row is written; until
then nobody is told of it, and a writer that died on the way has left nothing that a reader could see.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from offbeat.files import fsync_folder, replace_folder
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.serve.http.limits import MIB
from offbeat.serve.http.refusals import Refusal, damaged
from offbeat.serve.http.wire import WeightFile
from offbeat.weights.folder import WeightFolder
from offbeat.weights.version import Version

FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""No separators, and no leading dot: nothing outside a version's folder, and no draft, can be named."""
PIECE_BYTES = MIB
MAX_DIGESTS = 256


class WholeFiles:
    """The run's weights, as callers see them."""

    def __init__(self, folder: WeightFolder, published: Callable[[int], Version | None]):
        self.folder, self._published = folder, published
        self._digests: dict[tuple[Path, int, int], bytes] = {}
        self._parts = itertools.count()

    async def files(self, number: int) -> list[WeightFile]:
        """What a published version consists of."""
        return await asyncio.to_thread(self._files, number)

    def _files(self, number: int) -> list[WeightFile]:
        folder = self._place(number)
        found = sorted(path for path in folder.glob("*") if path.is_file() and FILE.fullmatch(path.name))
        if not found:
            raise Unknown(f"version {number}: its weights are no longer kept")
        return [WeightFile(path.name, path.stat().st_size, self._digest(path).hex()) for path in found]

    async def find(self, number: int, name: str) -> tuple[Path, int, bytes]:
        """A file of a published version, with its size and digest."""
        path = self._place(number) / _checked(name)
        try:
            return path, path.stat().st_size, await asyncio.to_thread(self._digest, path)
        except FileNotFoundError:
            raise Unknown(f"version {number}: has no file {name}") from None

    def _place(self, number: int) -> Path:
        version = self._published(number)
        if version is None:
            raise Unknown(f"version {number}: never published")
        return version.path

    def _digest(self, path: Path) -> bytes:
        """Files of published versions never change, so each is read once."""
        status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size)
        if key not in self._digests:
            if len(self._digests) >= MAX_DIGESTS:
                self._digests.clear()
            self._digests[key] = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        return self._digests[key]

    async def receive(self, number: int, name: str, pieces: AsyncIterator[bytes], digest: bytes) -> bool:
        """Takes in a file of a version that is not published yet; False where it was published with this very file."""
        name = _checked(name)
        version = self._published(number)
        if version is not None:
            return await self._same(version, name, digest)
        draft = self.folder.draft(number)
        part = draft / f".{name}.{next(self._parts)}.part"
        try:
            await asyncio.to_thread(draft.mkdir, parents=True, exist_ok=True)
            await _write(part, pieces, digest)
            await asyncio.to_thread(_put_in_place, part, draft / name)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Refusal(
                507 if full else 500, f"version {number}: {name} cannot be written: {error.strerror}"
            ) from error
        finally:
            part.unlink(missing_ok=True)
        return True

    async def _same(self, version: Version, name: str, digest: bytes) -> bool:
        try:
            same = await asyncio.to_thread(self._digest, version.path / name) == digest
        except FileNotFoundError:
            same = False
        if not same:
            raise Conflict(f"version {version.number}: already published, and not with this {name}")
        return False

    async def settle(self, version: Version) -> Version:
        """Puts the draft of a version that is about to be published in its place; says where that is."""
        return await asyncio.to_thread(self._settle, version)

    def _settle(self, version: Version) -> Version:
        final, draft = self.folder.path(version.number), self.folder.draft(version.number)
        known = self._published(version.number)
        if known is not None:  # told twice; the ledger says whether it is the same
            return replace(version, path=known.path)
        if draft.is_dir():
            for part in draft.glob(".*.part"):
                part.unlink(missing_ok=True)
        if draft.is_dir() and any(draft.iterdir()):
            shutil.rmtree(final, ignore_errors=True)  # left by a writer that died before its row was written
            replace_folder(draft, final)
        if not final.is_dir():
            raise Refused(f"version {version.number}: its weights were never sent")
        return replace(version, path=final)


async def pieces_of(path: Path, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes of a file. It stays readable to its end even if it is deleted meanwhile."""
    with await asyncio.to_thread(open, path, "rb") as file:
        while start < stop:
            piece = await asyncio.to_thread(os.pread, file.fileno(), min(PIECE_BYTES, stop - start), start)
            if not piece:
                raise OSError(f"{path}: ends at {start}, not at {stop}")
            start += len(piece)
            yield piece


async def _write(part: Path, pieces: AsyncIterator[bytes], digest: bytes) -> None:
    hasher, gathered = blake3(max_threads=blake3.AUTO), bytearray()
    with await asyncio.to_thread(open, part, "wb") as file:

        def store() -> None:
            hasher.update(gathered)
            file.write(gathered)
            gathered.clear()

        async for piece in pieces:
            gathered += piece
            if len(gathered) >= PIECE_BYTES:
                await asyncio.to_thread(store)
        await asyncio.to_thread(store)
        if hasher.digest() != digest:
            raise damaged("file")
        await asyncio.to_thread(file.flush)
        await asyncio.to_thread(os.fsync, file.fileno())


def _put_in_place(part: Path, final: Path) -> None:
    os.replace(part, final)
    fsync_folder(final.parent)


def _checked(name: str) -> str:
    if FILE.fullmatch(name) is None:
        raise Unknown(f"file {name[:80]!r}: not the name of a file of weights")
    return name
