"""Brings published versions onto this machine, as what changed since one that is here where that can be.

A version's manifest must be signed by a key that we trust and be the one that the ledger names. Its bases are walked
back to a version that is here or to a full one; the pieces on the way are fetched (`offbeat.weights.incoming`), and the
new version is built beside the old ones, verified, flushed and renamed (`offbeat.weights.assemble`). A base that turns
out to be unfit is left out: then the walk goes back to the full one. Where no chain of pieces leads to a version any
more, a copy of its whole file takes their place, if there is somebody to ask for one.

Guarantees: what `fetch` returns is bit by bit what was published, or it raises an error that names the version; a
process killed at any moment leaves every earlier version whole, and its successor goes on with the bytes that are
there; nothing that came from a source is believed unless its digest is the one that a signed manifest names. The folder
belongs to one worker; peers may read the pieces in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbeat.crash import crash_here
from offbeat.errors import OffbeatError
from offbeat.files import fsync_file, remedy, replace_folder
from offbeat.weights.assemble import assemble
from offbeat.weights.background import in_thread
from offbeat.weights.digest import file_digest
from offbeat.weights.folder import FILE_NAME
from offbeat.weights.incoming import MAX_ATTEMPTS, Incoming
from offbeat.weights.manifest import Kind, Manifest, ManifestError
from offbeat.weights.pieces import PieceDamaged, PieceMissing
from offbeat.weights.shelf import Shelf
from offbeat.weights.sources import Sources
from offbeat.weights.verify import WeightsError
from offbeat.weights.version import Version

__all__ = ["Figures", "Receiver", "Sources"]

log = logging.getLogger(__name__)

NUM_KEPT = 3
"""The one that is served, the one before it that engines may still read, and one to spare."""
COPY = "copy"
"""The kind of what comes as a whole file, beside those of manifests."""
NO_WAY = (PieceMissing, PieceDamaged, ManifestError, WeightsError)
"""What says that a version cannot be had in this way; anything else, such as a line that is down, ends the attempt."""
Copy = Callable[[int, Path], Awaitable[None]]
"""Fills a file with a version's whole file, by number, going on from what is there."""


@dataclass
class Figures:
    """What bringing one version took."""

    number: int
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Fetched, by the kind of version that they belong to, or as a copy."""
    num_applied: int = 0
    """Versions that were applied one after the other; 0: it is a copy."""
    fetch_s: float = 0.0
    apply_s: float = 0.0


class Receiver:
    """The versions of one worker, on its disk."""

    def __init__(
        self,
        folder: Path,
        sources: Sources,
        trusted: Collection[str],
        num_kept: int = NUM_KEPT,
        *,
        copy: Copy | None = None,
        has_base: Callable[[str], bool] = lambda digest: False,
        report: Callable[[Figures], None] = lambda figures: None,
        arrived: Callable[[], None] = lambda: None,
    ):
        """`copy` is the way out where pieces are gone; `has_base` says, by its digest, whether whoever serves adapters
        has their base already; `report` is told what each version took, and `arrived` when there is something new in
        `incoming.store` for peers."""
        self.shelf = Shelf(folder, num_kept)
        self.incoming = Incoming(self.shelf.folder, sources, trusted, arrived)
        self._copy, self._has_base, self._report = copy, has_base, report
        self._lock = asyncio.Lock()

    async def fetch(self, version: Version) -> Version:
        """The same version, verified, with its files here; at once where they are."""
        if not version.manifest:
            raise OffbeatError(
                f"version {version.number}: published without a manifest; run the same Offbeat on all machines"
            )
        async with self._lock:
            try:
                place, base = await self._bring(version)
                await in_thread(self._forget)
            except OSError as error:
                if isinstance(error, (OffbeatError, ConnectionError, TimeoutError)):
                    raise
                raise OffbeatError(
                    f"version {version.number}: cannot be written to {self.shelf.folder}: {error.strerror or error}; "
                    f"{remedy(error)}, then start the worker again"
                ) from error
            return replace(version, path=place, base=base)

    async def discard(self, version: Version) -> None:
        """Forgets a version that somebody found to be damaged, so that it is fetched anew."""
        async with self._lock:
            await in_thread(self.shelf.discard, self.shelf.place(version.number, version.digest))

    async def _bring(self, version: Version) -> tuple[Path, Path | None]:
        """A version's place, and that of what it stands on, where that was fetched, too."""
        base = None
        try:
            manifest = await self.incoming.manifest(version.number, version.digest, version.manifest)
            if manifest.step != version.step:
                raise ManifestError(f"the manifest is that of step {manifest.step}, not {version.step}")
            found = manifest.base if manifest.kind is Kind.ADAPTER else None
            if found is not None and not await in_thread(self._has_base, found.digest):
                base = await self.incoming.manifest(found.number, found.digest, found.manifest or "")
        except NO_WAY as error:
            raise WeightsError(f"version {version.number}: no manifest that can be trusted: {error}") from error
        crash_here("manifest-kept")
        ground = None if base is None else await self._ensure(base)  # an adapter is nothing without it
        return await self._ensure(manifest), ground

    async def _ensure(self, manifest: Manifest) -> Path:
        """A version's place, with the version in it."""
        place = self.shelf.place(manifest.number, manifest.digest)
        if await in_thread(self.shelf.holds, place, manifest.digest):
            return place
        figures = Figures(manifest.number)
        try:
            await self._build(manifest, place, figures)
        except NO_WAY as error:
            if self._copy is None or manifest.kind is Kind.ADAPTER:
                raise WeightsError(f"version {manifest.number} cannot be had: {error}") from error
            log.warning("version %d: fetched as a whole file: %s", manifest.number, error)
            try:
                await self._take_copy(manifest, place, self._copy, figures)
            except NO_WAY as other:
                raise WeightsError(
                    f"version {manifest.number} cannot be had: {error}; nor as a whole file: {other}"
                ) from other
        self.shelf.admit(place)
        crash_here("version-built")
        self._report(figures)
        return place

    async def _build(self, manifest: Manifest, place: Path, figures: Figures) -> None:
        """Upon a base that is here; should that prove unfit, from the ground."""
        chain, base = await self._walk(manifest, is_base_welcome=True)
        try:
            return await self._apply(chain, base, place, figures)
        except WeightsError as error:
            if base is None:
                raise
            log.warning("version %d: built anew without %s: %s", manifest.number, base.name, error)
            self.shelf.doubt(base)
        chain, _ = await self._walk(manifest, is_base_welcome=False)
        await self._apply(chain, None, place, figures)

    async def _walk(self, manifest: Manifest, *, is_base_welcome: bool) -> tuple[list[Manifest], Path | None]:
        """The versions to apply, in order, and the place of the one that the first stands on: a version that is here,
        or none, where the first is full."""
        oldest = min(await in_thread(self.shelf.numbers), default=manifest.number) if is_base_welcome else None
        chain = [manifest]
        while chain[0].kind is Kind.DELTA and (base := chain[0].base) is not None:
            place = self.shelf.place(base.number, base.digest)
            if is_base_welcome and await in_thread(self.shelf.holds, place, base.digest):
                return chain, place
            chain.insert(0, await self.incoming.manifest(base.number, base.digest))
        if oldest is not None and oldest < chain[0].number:
            return await self._by_twin(chain, oldest)
        return chain, None

    async def _by_twin(self, chain: list[Manifest], oldest: int) -> tuple[list[Manifest], Path | None]:
        """A chain that begins with an anchor, by what changed in it instead, where that leads to a version that is
        here over fewer bytes. What is older than all that is here is not looked at."""
        anchor, found = chain[0], chain[0]
        line: list[Manifest] = []
        while found.delta is not None or found.kind is Kind.DELTA:
            if found.delta is not None:
                found = await self.incoming.manifest(found.number, found.digest, found.delta)
            line.insert(0, found)
            if found.base is None or found.base.number < oldest or _weight(line) >= anchor.num_coded_bytes:
                break
            place = self.shelf.place(found.base.number, found.base.digest)
            if await in_thread(self.shelf.holds, place, found.base.digest):
                return [*line, *chain[1:]], place
            found = await self.incoming.manifest(found.base.number, found.base.digest)
        return chain, None

    async def _apply(self, chain: list[Manifest], base: Path | None, place: Path, figures: Figures) -> None:
        started_s = time.monotonic()
        figures.num_bytes += await self.incoming.pieces(chain)
        figures.num_applied = len(chain)
        crash_here("pieces-fetched")
        fetched_s = time.monotonic()
        figures.fetch_s += fetched_s - started_s
        await in_thread(assemble, chain, base, self.incoming.read, place)
        figures.apply_s += time.monotonic() - fetched_s

    async def _take_copy(self, manifest: Manifest, place: Path, copy: Copy, figures: Figures) -> None:
        file, started_s = place.with_name(f".{place.name}.copy.draft") / FILE_NAME, time.monotonic()
        figures.num_applied = 0
        for _ in range(MAX_ATTEMPTS):
            file.parent.mkdir(parents=True, exist_ok=True)
            have = file.stat().st_size if file.exists() else 0
            await copy(manifest.number, file)
            figures.num_bytes[COPY] += max(file.stat().st_size - have, 0)
            if await in_thread(_put_copy, file, manifest.digest, place):
                figures.fetch_s += time.monotonic() - started_s
                return
            log.warning("version %d: its whole file arrived damaged", manifest.number)
        raise WeightsError(f"it arrived damaged {MAX_ATTEMPTS} times")

    def _forget(self) -> None:
        """Keeps a few versions, what the adapters among them stand on, and their pieces, which peers may ask for."""
        known = self.incoming.known()
        places = {entry: self.shelf.place(found.number, found.digest) for entry, found in known.items()}
        needs = {
            places[entry]: self.shelf.place(found.base.number, found.base.digest)
            for entry, found in known.items()
            if found.kind is Kind.ADAPTER and found.base is not None
        }
        kept = self.shelf.forget(needs)
        crash_here("half-forgotten")
        self.incoming.forget([entry for entry, place in places.items() if place not in kept])


def _weight(chain: list[Manifest]) -> int:
    return sum(manifest.num_coded_bytes for manifest in chain)


def _put_copy(file: Path, digest: str, place: Path) -> bool:
    """Gives a whole file its place if it is right, and deletes it otherwise."""
    try:
        if file_digest(file) != digest:
            raise ValueError("another digest")
    except (ValueError, KeyError, TypeError):
        file.unlink()
        return False
    fsync_file(file)
    replace_folder(file.parent, place)
    return True
