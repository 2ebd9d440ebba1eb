"""Where published versions come from, as whoever receives them sees it, and the simplest such place: a store.

None of them needs to be trusted: manifests are signed, and pieces are named by their digests.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

from offbeat.weights.background import in_thread
from offbeat.weights.manifest import Manifest, ManifestError
from offbeat.weights.pieces import Entry, PieceDamaged, PieceMissing, PieceStore

SLICE_BYTES = 4 * 1024 * 1024


class Sources(Protocol):
    """The coordinator, a store, peers. What is gone for good is a `PieceMissing`; any other error may pass."""

    async def manifest(self, number: int, digest: str) -> bytes:
        """A sealed manifest by its own digest, or by the version's number alone where that is ""."""

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        """Brings a file to a piece's length, going on from what is there."""


class StoreSources:
    """A store that this machine reaches by itself: a shared folder, a bucket."""

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
        # Two trainers may have published the same number. Who asks knows which is right, and asks again if it is not.
        entry = self._twins_last(found)[self._num_asked[number] % len(found)]
        self._num_asked[number] += 1
        return self._store.get_manifest(*entry)

    def _twins_last(self, entries: list[Entry]) -> list[Entry]:
        """What changed in an anchor would do as well, but leads back past it, to what may be collected by now."""
        twins = {self._twin_of(entry) for entry in entries} if len(entries) > 1 else set()
        return sorted(entries, key=lambda entry: entry[1] in twins)

    def _twin_of(self, entry: Entry) -> str | None:
        try:
            return Manifest.decode(self._store.get_manifest(*entry).partition(b"\n")[0]).delta
        except (ManifestError, PieceMissing, PieceDamaged):  # who asked for it will say so
            return None

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        await in_thread(self._piece, digest, num_bytes, into)

    def _piece(self, digest: str, num_bytes: int, into: Path) -> None:
        have = into.stat().st_size if into.exists() else 0
        with open(into, "ab" if have <= num_bytes else "wb") as file:
            while (at := file.tell()) < num_bytes:  # in slices: peers that wait for it see that it comes
                data = self._store.get(digest, at, min(at + SLICE_BYTES, num_bytes))
                if not data:
                    return  # it is shorter than it should be, which its digest will tell
                file.write(data)
                file.flush()
