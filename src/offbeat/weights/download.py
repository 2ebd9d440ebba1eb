"""Downloads manifests and pieces, checks them, and keeps them for this worker and its peers.

A manifest is accepted if a trusted key signed it and it is the requested one; a piece if its digest is its name. A
partial download lies beside its final path, and the next attempt resumes it. Pieces of an earlier process are hashed
once before they are used.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from offbeat.files import fsync_file
from offbeat.testing.crash_points import crash_here
from offbeat.waiting import in_thread
from offbeat.weights.manifest import Kind, Manifest, ManifestError, PieceEntry, manifest_digest
from offbeat.weights.piece_store import Entry, FolderStore, PieceDamaged, PieceMissing, PieceStore, piece_path
from offbeat.weights.signing import open_sealed

SLICE_BYTES = 4 * 1024 * 1024


class Sources(Protocol):
    """A source of published versions: the coordinator, a store, peers. None is trusted: manifests are signed, pieces
    named by their digests. `PieceMissing` means gone for good; any other error may be temporary."""

    async def manifest(self, number: int, digest: str) -> bytes:
        """A sealed manifest by its digest; "": by the version's number alone."""

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        """Downloads a piece into a file, resuming from what is there."""


class StoreSources:
    """A store that this machine reaches itself: a shared folder, a bucket."""

    def __init__(self, store: PieceStore):
        self._store = store
        self._num_asked: Counter[int] = Counter()

    async def manifest(self, number: int, digest: str) -> bytes:
        return await in_thread(self._manifest, number, digest)

    def _manifest(self, number: int, digest: str) -> bytes:
        if digest:
            return self._store.get_manifest(number, digest)
        found = sorted(entry for entry in self._store.list_manifests() if entry[0] == number)
        if not found:
            raise PieceMissing(f"version {number}: no manifest in the store")
        # Two trainers may have published the same number. The caller knows the right one, and repeats the call.
        entry = self._anchor_deltas_last(found)[self._num_asked[number] % len(found)]
        self._num_asked[number] += 1
        return self._store.get_manifest(*entry)

    def _anchor_deltas_last(self, entries: list[Entry]) -> list[Entry]:
        """Puts an anchor's delta manifest last: its base may have been collected."""
        deltas = {self._delta_of(entry) for entry in entries} if len(entries) > 1 else set()
        return sorted(entries, key=lambda entry: entry[1] in deltas)

    def _delta_of(self, entry: Entry) -> str | None:
        try:
            return Manifest.decode(self._store.get_manifest(*entry).partition(b"\n")[0]).delta
        except (ManifestError, PieceMissing, PieceDamaged):  # the caller will meet it
            return None

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        await in_thread(self._piece, digest, num_bytes, into)

    def _piece(self, digest: str, num_bytes: int, into: Path) -> None:
        have = into.stat().st_size if into.exists() else 0
        with open(into, "ab" if have <= num_bytes else "wb") as file:
            while (at := file.tell()) < num_bytes:  # in slices: waiting peers see the progress
                data = self._store.get(digest, at, min(at + SLICE_BYTES, num_bytes))
                if not data:
                    return  # too short, which its digest will show
                file.write(data)
                file.flush()


log = logging.getLogger(__name__)

NUM_PARALLEL = 4
"""Pieces in flight: enough to fill a line with a long round trip, few enough to hold in memory."""
MAX_ATTEMPTS = 3
"""Downloads of something that arrives whole but wrong: after that, the network is not to blame."""


class PieceDownloader:
    """Manifests and pieces of one worker. Its store is a folder that no other worker writes to."""

    def __init__(self, folder: Path, sources: Sources, trusted: Collection[str], arrived: Callable[[], None]):
        """`arrived` is called after each addition to the store."""
        self.store = FolderStore(folder)
        self._sources, self._trusted, self._arrived = sources, trusted, arrived
        self._known: dict[Entry, Manifest] | None = None
        self.expected: set[str] = set()
        """Pieces being downloaded or about to be: a peer that asks for one may wait for it."""

    def expects(self, digest: str) -> bool:
        return digest in self.expected

    async def manifest(self, number: int, version_digest: str, digest: str = "") -> Manifest:
        """A version's manifest, by its own digest where that is known."""
        here = [
            found
            for entry, found in (await in_thread(self.known)).items()
            if (entry[0], found.digest) == (number, version_digest) and digest in ("", entry[1])
        ]
        if here:
            return max(here, key=lambda found: found.kind is Kind.FULL)  # an anchor before its delta
        for left in reversed(range(MAX_ATTEMPTS)):
            sealed = await self._sources.manifest(number, digest)
            try:
                data = open_sealed(sealed, self._trusted)
                found = _check(data, number, version_digest, digest)
            except ManifestError as error:
                if not left:
                    raise
                log.warning("%s; asked again", error)
            else:
                entry = number, manifest_digest(data)
                await in_thread(self.store.put_manifest, *entry, sealed)
                self.known()[entry] = found
                self._arrived()
                return found
        raise AssertionError("the last attempt returns or raises")

    async def pieces(self, chain: Sequence[Manifest]) -> Counter[str]:
        """Downloads the missing pieces of some versions; returns the bytes downloaded, by kind of version."""
        wanted = {piece.digest: (piece, manifest) for manifest in chain for piece in manifest.pieces}
        missing = await in_thread(lambda: [entry for entry in wanted.values() if not self._has(entry[0])])
        self.expected = {piece.digest for piece, _ in missing}
        num_bytes: Counter[str] = Counter()
        waiting = iter(missing)

        async def download() -> None:
            for piece, manifest in waiting:
                fetched = await self._piece(piece, manifest.number)
                num_bytes[manifest.kind.value] += fetched  # not in one line with the await: others add meanwhile
                self.expected.discard(piece.digest)
                self._arrived()

        tasks = [asyncio.ensure_future(download()) for _ in range(NUM_PARALLEL)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # none may still write when the next attempt begins
            self.expected = set()
        return num_bytes

    async def _piece(self, piece: PieceEntry, number: int) -> int:
        part, num_bytes = self._part(piece.digest), 0
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(MAX_ATTEMPTS):
            have = part.stat().st_size if part.exists() else 0
            try:
                await self._sources.piece(piece.digest, piece.num_bytes, part)
            except (PieceMissing, PieceDamaged) as error:  # at the source, where a retry is of no use
                raise type(error)(f"version {number}: {error}") from error
            num_bytes += max(part.stat().st_size - have, 0)
            if await in_thread(self._put_in_place, part, piece):
                return num_bytes
            log.warning("version %d: piece %s arrived damaged", number, piece.digest)
        raise PieceDamaged(f"version {number}: piece {piece.digest} arrived damaged {MAX_ATTEMPTS} times")

    def num_bytes_arrived(self) -> int:
        """Bytes of unfinished downloads; finished ones count no more, so that any change means progress."""
        sizes = 0
        for digest in list(self.expected):
            with suppress(FileNotFoundError):
                sizes += self._part(digest).stat().st_size
        return sizes - len(self.expected)  # a piece that came whole between two calls shows, too

    def _part(self, digest: str) -> Path:
        return self._path_of(digest).with_suffix(".part")

    def _path_of(self, digest: str) -> Path:
        return self.store.folder / piece_path(digest)

    def _put_in_place(self, part: Path, piece: PieceEntry) -> bool:
        """Renames a piece if its digest is right, and deletes it otherwise."""
        if not _is(part.read_bytes(), piece):
            part.unlink()
            return False
        fsync_file(part)
        crash_here("piece-arrived")
        os.replace(part, self._path_of(piece.digest))
        return True

    def _has(self, piece: PieceEntry) -> bool:
        """Whether an intact piece is here."""
        try:
            return _is(self.store.get(piece.digest), piece)
        except PieceMissing:
            return False
        except PieceDamaged:
            self.store.delete([piece.digest], [])
            return False

    def read(self, digest: str) -> memoryview:
        """A downloaded piece, mapped for as long as the view is held."""
        with open(self._path_of(digest), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")  # which cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def known(self) -> dict[Entry, Manifest]:
        """The manifests on this machine, by number and digest; read from disk once."""
        if self._known is None:
            self._known = {}
            for entry in self.store.list_manifests():
                try:
                    data = open_sealed(self.store.get_manifest(*entry), self._trusted)
                    self._known[entry] = _check(data, entry[0], None, entry[1])
                except (ManifestError, PieceMissing, PieceDamaged):  # of another trainer, or damaged
                    self.store.delete([], [entry])
        return self._known

    def forget(self, manifests: Collection[Entry]) -> None:
        """Deletes manifests, and every piece that no other one names."""
        for entry in manifests:
            self.known().pop(entry, None)
        wanted = {piece.digest for found in self.known().values() for piece in found.pieces}
        self.store.delete([digest for digest in self.store.list_pieces() if digest not in wanted], list(manifests))
        self.store.sweep(0.0)
        for part in self.store.folder.glob("pieces/*/*.part"):  # of versions that were given up
            part.unlink(missing_ok=True)


def _check(data: bytes, number: int, version_digest: str | None, digest: str) -> Manifest:
    """Decodes a manifest; raises unless it is the requested one."""
    if digest and manifest_digest(data) != digest:
        raise ManifestError(f"version {number}: the manifest is {manifest_digest(data)[:12]}, not {digest[:12]}")
    found = Manifest.decode(data)
    if found.number != number:
        raise ManifestError(f"version {number}: the manifest is that of version {found.number}")
    if version_digest not in (None, found.digest):
        raise ManifestError(f"version {number}: the manifest is that of another one of this number")
    return found


def _is(data: bytes, piece: PieceEntry) -> bool:
    return len(data) == piece.num_bytes and blake3(data).hexdigest() == piece.digest
