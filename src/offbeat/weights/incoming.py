"""Manifests and pieces as they arrive on this machine: checked, then kept for this worker and for its peers.

A manifest counts when a trusted key has signed it and it is the one that was asked for; a piece counts when its digest
is its name. What is still on its way lies beside its place, in a file that the next attempt goes on with. What an
earlier process left is read once before it is used.
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

from blake3 import blake3

from offbeat.crash import crash_here
from offbeat.files import fsync_file
from offbeat.weights.background import in_thread
from offbeat.weights.manifest import Kind, Manifest, ManifestError, PieceEntry, manifest_digest
from offbeat.weights.pieces import Entry, FolderStore, PieceDamaged, PieceMissing, piece_path
from offbeat.weights.signing import open_sealed
from offbeat.weights.sources import Sources

log = logging.getLogger(__name__)

NUM_PARALLEL = 4
"""Pieces on their way at a time: enough to fill a line whose answers take long, few enough to hold in memory."""
MAX_ATTEMPTS = 3
"""At something that arrives whole and is not what was asked for: then it is not the network that is to blame."""


class Incoming:
    """What one worker has fetched. Its store is a folder that no other worker writes to."""

    def __init__(self, folder: Path, sources: Sources, trusted: Collection[str], arrived: Callable[[], None]):
        """`arrived` is called whenever something has come into the store."""
        self.store = FolderStore(folder)
        self._sources, self._trusted, self._arrived = sources, trusted, arrived
        self._known: dict[Entry, Manifest] | None = None
        self.expected: set[str] = set()
        """Pieces that are on their way or will be: who is asked for one may wait for it."""

    async def manifest(self, number: int, version_digest: str, digest: str = "") -> Manifest:
        """A version's manifest, by its own digest where that is known."""
        here = [
            found
            for entry, found in (await in_thread(self.known)).items()
            if (entry[0], found.digest) == (number, version_digest) and digest in ("", entry[1])
        ]
        if here:
            return max(here, key=lambda found: found.kind is Kind.FULL)  # of an anchor, not its twin
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
        """Sees to it that every piece of some versions is here; how many bytes that took, by kind of version."""
        wanted = {piece.digest: (piece, manifest) for manifest in chain for piece in manifest.pieces}
        missing = await in_thread(lambda: [entry for entry in wanted.values() if not self._has(entry[0])])
        self.expected = {piece.digest for piece, _ in missing}
        num_bytes: Counter[str] = Counter()
        waiting = iter(missing)

        async def carry() -> None:
            for piece, manifest in waiting:
                fetched = await self._piece(piece, manifest.number)
                num_bytes[manifest.kind.value] += fetched  # not in one line with the wait: others add meanwhile
                self.expected.discard(piece.digest)
                self._arrived()

        carriers = [asyncio.ensure_future(carry()) for _ in range(NUM_PARALLEL)]
        try:
            await asyncio.gather(*carriers)
        finally:
            for carrier in carriers:
                carrier.cancel()
            await asyncio.wait(carriers)  # none may still write when the next attempt begins
            self.expected = set()
        return num_bytes

    async def _piece(self, piece: PieceEntry, number: int) -> int:
        part, num_bytes = self._part(piece.digest), 0
        part.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(MAX_ATTEMPTS):
            have = part.stat().st_size if part.exists() else 0
            try:
                await self._sources.piece(piece.digest, piece.num_bytes, part)
            except (PieceMissing, PieceDamaged) as error:  # at the source, where asking again is of no use
                raise type(error)(f"version {number}: {error}") from error
            num_bytes += max(part.stat().st_size - have, 0)
            if await in_thread(self._admit, part, piece):
                return num_bytes
            log.warning("version %d: piece %s arrived damaged", number, piece.digest)
        raise PieceDamaged(f"version {number}: piece {piece.digest} arrived damaged {MAX_ATTEMPTS} times")

    def num_bytes_arrived(self) -> int:
        """Of the pieces that are on their way; what is complete counts no more, so any change means that some came."""
        sizes = 0
        for digest in list(self.expected):
            with suppress(FileNotFoundError):
                sizes += self._part(digest).stat().st_size
        return sizes - len(self.expected)  # a piece that came whole between two looks shows, too

    def _part(self, digest: str) -> Path:
        return self._place(digest).with_suffix(".part")

    def _place(self, digest: str) -> Path:
        return self.store.folder / piece_path(digest)

    def _admit(self, part: Path, piece: PieceEntry) -> bool:
        """Gives a piece its name if it is right, and deletes it otherwise."""
        if not _is(part.read_bytes(), piece):
            part.unlink()
            return False
        fsync_file(part)
        crash_here("piece-arrived")
        os.replace(part, self._place(piece.digest))
        return True

    def _has(self, piece: PieceEntry) -> bool:
        """Whether a piece that was fetched before is here, and still right."""
        try:
            return _is(self.store.get(piece.digest), piece)
        except PieceMissing:
            return False
        except PieceDamaged:
            self.store.delete([piece.digest], [])
            return False

    def read(self, digest: str) -> memoryview:
        """A piece that `pieces` has seen to, for as long as the view is held."""
        with open(self._place(digest), "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")  # which cannot be mapped
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def known(self) -> dict[Entry, Manifest]:
        """The manifests on this machine, by number and digest; read once."""
        if self._known is None:
            self._known = {}
            for entry in self.store.list_manifests():
                try:
                    data = open_sealed(self.store.get_manifest(*entry), self._trusted)
                    self._known[entry] = _check(data, entry[0], None, entry[1])
                except (ManifestError, PieceMissing, PieceDamaged):  # another trainer's, or damaged
                    self.store.delete([], [entry])
        return self._known

    def forget(self, manifests: Collection[Entry]) -> None:
        """Deletes some manifests, and every piece that no other one names."""
        for entry in manifests:
            self.known().pop(entry, None)
        wanted = {piece.digest for found in self.known().values() for piece in found.pieces}
        self.store.delete([digest for digest in self.store.list_pieces() if digest not in wanted], list(manifests))
        self.store.sweep(0.0)
        for part in self.store.folder.glob("pieces/*/*.part"):  # of versions that were given up
            part.unlink(missing_ok=True)


def _check(data: bytes, number: int, version_digest: str | None, digest: str) -> Manifest:
    """The manifest in it, if that is the one that was asked for."""
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
