"""Weights from the coordinator: manifests and pieces, and versions that were published as whole files.

A whole file is fetched beside its place, from where an earlier attempt ended, checked against its digest and renamed; a
version's folder takes its name when all its files are whole. So a folder that is there is whole, and a restarted worker
goes on where it was. Folders are named by number and digest: another run's versions are never mistaken for ours. The
folder belongs to one worker.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import aiohttp
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import cannot_write, fsync_file, replace_folder
from offbeat.ledger.errors import Unknown
from offbeat.serve.http import wire
from offbeat.serve.http.connection import Connection
from offbeat.weights.folder import FILE_NAME
from offbeat.weights.pieces import PieceMissing
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

NUM_KEPT = 3
"""The one that is served, the one before it that engines may still read, and one to spare."""
MAX_ATTEMPTS = 3
"""At a file that arrives whole and with another digest: then it is not the network that is to blame."""
FOLDER = re.compile(r"(\d{8,})-[0-9a-f]+")


class WeightCache:
    """Versions on this machine."""

    def __init__(self, folder: Path, connection: Connection, num_kept: int = NUM_KEPT):
        self.folder, self._connection, self._num_kept = folder.absolute(), connection, num_kept
        self._lock = asyncio.Lock()

    async def fetch(self, version: Version) -> Version:
        """The same version, with its files here; its own digest is the caller's to check."""
        async with self._lock:
            final = self._place(version)
            if not final.is_dir():
                await self._download(version, final)
            await asyncio.to_thread(self._forget_old, final)
            return replace(version, path=final, base=None)

    def _place(self, version: Version) -> Path:
        return self.folder / f"{version.number:08d}-{blake3(version.digest.encode()).hexdigest()[:16]}"

    async def _download(self, version: Version, final: Path) -> None:
        draft = final.with_name(f".{final.name}.draft")
        draft.mkdir(parents=True, exist_ok=True)
        listed = await self._connection.get(f"/v1/weights/{version.number}", wire.WeightFiles)
        for file in listed.files:
            if not (draft / file.name).exists():
                await self._file(version.number, file, draft)
        await asyncio.to_thread(replace_folder, draft, final)

    async def _file(self, number: int, file: wire.WeightFile, draft: Path) -> None:
        part = draft / f"{file.name}.part"
        for _ in range(MAX_ATTEMPTS):
            await fill(self._connection, f"/v1/weights/{number}/{file.name}", part, file.num_bytes)
            digest = await asyncio.to_thread(_digest, part)
            if digest == file.blake3:
                await asyncio.to_thread(fsync_file, part)
                part.rename(draft / file.name)
                return
            log.warning("version %d: %s arrived damaged; fetched again", number, file.name)
            part.unlink()
        raise OffbeatError(f"version {number}: {file.name} arrived damaged {MAX_ATTEMPTS} times")

    def _forget_old(self, current: Path) -> None:
        found = sorted(path for path in self.folder.glob("[0-9]*") if FOLDER.fullmatch(path.name) and path != current)
        for path in found[: max(len(found) - (self._num_kept - 1), 0)]:
            shutil.rmtree(path, ignore_errors=True)
        for draft in self.folder.glob(".*.draft"):  # of versions that were given up; the current one is whole
            shutil.rmtree(draft, ignore_errors=True)


class CoordinatorSources:
    """Manifests and pieces from the coordinator, for `offbeat.weights.receive`."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def signers(self) -> list[str]:
        """The keys that manifests of the run are signed with."""
        return (await self._connection.get("/v1/signers", wire.Signers)).keys

    async def peers(self, site: str, host: str, port: int, root_bytes_per_s: float | None) -> wire.SourceList:
        """Whom to ask before the root, for a worker that serves pieces itself at a port, or nowhere if that is 0;
        `host` is its own address where it has to name one."""
        call = wire.SourcesCall(site=site, host=host, port=port, root_bytes_per_s=root_bytes_per_s or None)
        return await self._connection.call("/v1/sources", call, wire.SourceList)

    async def manifest(self, number: int, digest: str) -> bytes:
        try:
            path = f"/v1/manifests/{number}/{digest}" if digest else f"/v1/manifests/{number}"
            return await self._connection.send("GET", path)
        except Unknown as error:
            raise PieceMissing(str(error)) from error

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        try:
            await fill(self._connection, f"/v1/pieces/{digest}", into, num_bytes)
        except Unknown as error:
            raise PieceMissing(str(error)) from error

    async def copy(self, number: int, into: Path) -> None:
        """A version's whole file, where the coordinator has it."""
        try:
            listed = await self._connection.get(f"/v1/weights/{number}", wire.WeightFiles)
            (file,) = [file for file in listed.files if file.name == FILE_NAME]
            await fill(self._connection, f"/v1/weights/{number}/{FILE_NAME}", into, file.num_bytes)
        except (Unknown, ValueError) as error:
            raise PieceMissing(f"version {number}: nobody has a whole copy: {error}") from error


async def fill(connection: Connection, path: str, part: Path, num_bytes: int) -> None:
    """Brings a file to its length from where it ends, however often the line breaks on the way."""
    part.touch()
    retry = connection.retry(f"GET {path}")
    while (have := part.stat().st_size) != num_bytes:
        if have > num_bytes:
            part.write_bytes(b"")
            continue
        try:
            await _append(connection, path, part, have)
        except OffbeatError:
            raise
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            now = part.stat().st_size
            if now > have:  # it goes on, so patience begins anew
                retry = connection.retry(f"GET {path}")
            await retry.pause(f"broke off at {now} of {num_bytes} bytes: {type(error).__name__}: {error}")


async def _append(connection: Connection, path: str, part: Path, have: int) -> None:
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        async with connection.open(path, headers) as response:
            mode = "ab" if response.status == 206 else "wb"
            with await asyncio.to_thread(open, part, mode) as file:
                async for piece in response.content.iter_chunked(1024 * 1024):
                    await asyncio.to_thread(file.write, piece)
    except OSError as error:
        if isinstance(error, (OffbeatError, aiohttp.ClientError, TimeoutError, ConnectionError)):
            raise
        raise cannot_write(part, error, "then start the worker again") from error


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
