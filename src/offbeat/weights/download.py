"""Downloads manifests and pieces, checks them, and keeps them for this worker and its peers.

A manifest is accepted if it is the requested one and a trusted key signed it. A piece is accepted if its bytes match
its name. A partial download is kept beside its final path, and the next attempt resumes it. Pieces from an earlier
process are hashed before they are used.
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
    """Source of published versions: the coordinator, a store or peers. A source need not be trusted, because manifests
    are signed and pieces are named by their digests. `PieceMissing` means that the content is gone for good; any other
    error may be temporary."""

    async def manifest(self, number: int, digest: str) -> bytes:
        """Returns the signed manifest with `digest`; if `digest` is "", one of the manifests of version `number`."""

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        """Downloads a piece into the file `into`; resumes if part of it is there."""


class StoreSources:
    """Source of versions in a store that this machine can read directly, such as a shared folder or a bucket."""

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
            raise PieceMissing(f"the store has no manifest of version {number}; the version may have been deleted")
        # Two trainers may have published the same number. The caller repeats the call until it gets the right one.
        entry = self._anchor_deltas_last(found)[self._num_asked[number] % len(found)]
        self._num_asked[number] += 1
        return self._store.get_manifest(*entry)

    def _anchor_deltas_last(self, entries: list[Entry]) -> list[Entry]:
        """Returns the manifests `entries` of one version in the order in which to try them. If the version is an
        anchor, it has a delta manifest besides its full one. The delta manifest comes last, because its base may have
        been deleted."""
        deltas = {self._delta_of(entry) for entry in entries} if len(entries) > 1 else set()
        return sorted(entries, key=lambda entry: entry[1] in deltas)

    def _delta_of(self, entry: Entry) -> str | None:
        try:
            return Manifest.decode(self._store.get_manifest(*entry).partition(b"\n")[0]).delta
        except (ManifestError, PieceMissing, PieceDamaged):  # the caller will meet the same error
            return None

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        await in_thread(self._piece, digest, num_bytes, into)

    def _piece(self, digest: str, num_bytes: int, into: Path) -> None:
        have = into.stat().st_size if into.exists() else 0
        with open(into, "ab" if have <= num_bytes else "wb") as file:
            while (at := file.tell()) < num_bytes:  # in slices, so that waiting peers see progress
                data = self._store.get(digest, at, min(at + SLICE_BYTES, num_bytes))
                if not data:
                    return  # too short, which the check of its digest finds
                file.write(data)
                file.flush()


log = logging.getLogger(__name__)

NUM_PARALLEL = 4
"""Pieces downloaded at a time: enough to fill a line with a long round trip, few enough for memory."""
MAX_ATTEMPTS = 3
"""Most attempts to download content that arrives complete but with the wrong digest; if all fail, it is not chance."""


class PieceDownloader:
    """Downloads manifests and pieces for one worker into a store to which no other worker writes."""

    def __init__(self, folder: Path, sources: Sources, trusted: Collection[str], arrived: Callable[[], None]):
        """`trusted` are the keys whose manifests are accepted; `arrived` is called after each addition to the store."""
        self.store = FolderStore(folder)
        self._sources, self._trusted, self._arrived = sources, trusted, arrived
        self._known: dict[Entry, Manifest] | None = None
        self.expected: set[str] = set()
        """Digests of pieces being downloaded or about to be; a peer that asks for one of them may wait for it."""

    def expects(self, digest: str) -> bool:
        return digest in self.expected

    async def manifest(self, number: int, version_digest: str, digest: str = "") -> Manifest:
        """Returns the manifest of version `number`, from this disk or a source. `version_digest` is the digest of the
        version, `digest` that of the manifest itself, "" if unknown."""
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
                log.warning("%s; the manifest is requested again", error)
            else:
                entry = number, manifest_digest(data)
                await in_thread(self.store.put_manifest, *entry, sealed)
                self.known()[entry] = found
                self._arrived()
                return found
        raise AssertionError("this is a bug: the last attempt to get a manifest neither returned nor raised")

    async def pieces(self, chain: Sequence[Manifest]) -> Counter[str]:
        """Downloads the missing pieces of the manifests in `chain`; returns the bytes fetched, by kind of manifest."""
        wanted = {piece.digest: (piece, manifest) for manifest in chain for piece in manifest.pieces}
        missing = await in_thread(lambda: [entry for entry in wanted.values() if not self._has(entry[0])])
        self.expected = {piece.digest for piece, _ in missing}
        num_bytes: Counter[str] = Counter()
        waiting = iter(missing)

        async def download() -> None:
            for piece, manifest in waiting:
                fetched = await self._piece(piece, manifest.number)
                num_bytes[manifest.kind.value] += fetched  # not `+= await`: tasks overlap
                self.expected.discard(piece.digest)
                self._arrived()

        tasks = [asyncio.ensure_future(download()) for _ in range(NUM_PARALLEL)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # none may still write at the next attempt
            self.expected = set()
        return num_bytes

    async def _piece(self, piece: PieceEntry, number: int) -> int:
        part, num_bytes = self._part(piece.digest), 0
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(MAX_ATTEMPTS):
            have = part.stat().st_size if part.exists() else 0
            try:
                await self._sources.piece(piece.digest, piece.num_bytes, part)
            except (PieceMissing, PieceDamaged) as error:  # the source lacks it, so a retry is useless
                raise type(error)(f"version {number}: {error}") from error
            num_bytes += max(part.stat().st_size - have, 0)
            if await in_thread(self._put_in_place, part, piece):
                return num_bytes
            log.warning("version %d: piece %s arrived damaged and is discarded", number, piece.digest)
        raise PieceDamaged(f"version {number}: piece {piece.digest} arrived damaged {MAX_ATTEMPTS} times")

    def num_bytes_arrived(self) -> int:
        """Returns a number that changes as downloads progress, so that peers see whether it is worth waiting: the bytes
        of the unfinished pieces minus their number."""
        sizes = 0
        for digest in list(self.expected):
            with suppress(FileNotFoundError):
                sizes += self._part(digest).stat().st_size
        return sizes - len(self.expected)  # shows pieces that arrive whole between two calls

    def _part(self, digest: str) -> Path:
        return self._path_of(digest).with_suffix(".part")

    def _path_of(self, digest: str) -> Path:
        return self.store.folder / piece_path(digest)

    def _put_in_place(self, part: Path, piece: PieceEntry) -> bool:
        """Moves the downloaded file `part` into the store and returns True if it holds `piece`; otherwise deletes it
        and returns False."""
        if not _is(part.read_bytes(), piece):
            part.unlink()
            return False
        fsync_file(part)
        crash_here("piece-arrived")
        os.replace(part, self._path_of(piece.digest))
        return True

    def _has(self, piece: PieceEntry) -> bool:
        """Returns whether the piece is on this disk and intact; deletes a damaged one."""
        try:
            return _is(self.store.get(piece.digest), piece)
        except PieceMissing:
            return False
        except PieceDamaged:
            self.store.delete([piece.digest], [])
            return False

    def read(self, digest: str) -> memoryview:
        """Returns a downloaded piece, mapped into memory for as long as the caller holds the view."""
        with open(self._path_of(digest), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")  # an empty file cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def known(self) -> dict[Entry, Manifest]:
        """Returns the trusted manifests on this disk, by version number and manifest digest. The first call reads the
        disk, and deletes manifests that are damaged or not signed by a trusted key."""
        if self._known is None:
            self._known = {}
            for entry in self.store.list_manifests():
                try:
                    data = open_sealed(self.store.get_manifest(*entry), self._trusted)
                    self._known[entry] = _check(data, entry[0], None, entry[1])
                except (ManifestError, PieceMissing, PieceDamaged):  # from another trainer, or damaged
                    self.store.delete([], [entry])
        return self._known

    def forget(self, manifests: Collection[Entry]) -> None:
        """Deletes `manifests`, every piece that no remaining manifest names, and unfinished downloads."""
        for entry in manifests:
            self.known().pop(entry, None)
        wanted = {piece.digest for found in self.known().values() for piece in found.pieces}
        self.store.delete([digest for digest in self.store.list_pieces() if digest not in wanted], list(manifests))
        self.store.sweep(0.0)
        for part in self.store.folder.glob("pieces/*/*.part"):  # left from versions that were given up
            part.unlink(missing_ok=True)


def _check(data: bytes, number: int, version_digest: str | None, digest: str) -> Manifest:
    """Decodes and returns the manifest `data`. Raises `ManifestError` if it is not of version `number`, if the
    version's digest is not `version_digest` (None: any), or if the manifest's own digest is not `digest` ("": any)."""
    if digest and manifest_digest(data) != digest:
        raise ManifestError(
            f"version {number}: the manifest has digest {manifest_digest(data)[:12]}, not {digest[:12]}"
        )
    found = Manifest.decode(data)
    if found.number != number:
        raise ManifestError(f"version {number}: the manifest received is that of version {found.number}")
    if version_digest not in (None, found.digest):
        raise ManifestError(
            f"version {number}: the manifest received is for other weights, with digest {found.digest[:12]}"
        )
    return found


def _is(data: bytes, piece: PieceEntry) -> bool:
    return len(data) == piece.num_bytes and blake3(data).hexdigest() == piece.digest
