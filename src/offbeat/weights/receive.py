"""Fetches published versions onto this machine, if possible as changes to a version that is already here.

The version's base, the base's base and so on are looked up, back to a version on this disk or to a full one. The pieces
of these versions are downloaded (`weights.download`), and the new version is assembled beside the old ones
(`weights.assemble`). A version without a manifest, or whose pieces are gone, comes as whole files if `Receiver` has a
`copy`.

Guarantees: `fetch` returns a version that is bit by bit the published one, or raises an error that names it. A process
killed at any moment leaves every earlier version whole, and the next process resumes from the bytes already here.
Nothing from a source is used unless its digest follows from a signed manifest or from the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.files import fsync_file, remedy, replace_folder
from offbeat.testing.crash_points import crash_here
from offbeat.waiting import in_thread
from offbeat.weights.assemble import assemble
from offbeat.weights.download import MAX_ATTEMPTS, PieceDownloader, Sources
from offbeat.weights.manifest import Kind, Manifest, ManifestError
from offbeat.weights.piece_store import PieceDamaged, PieceMissing
from offbeat.weights.version import Version, WeightsError, folder_digest, weights_file

log = logging.getLogger(__name__)

FOLDER = re.compile(r"\d{8,}-[0-9a-f]{16}")
NUM_KEPT = 3
"""Number of versions kept on disk: the one being served, the one before, which engines may still read, and one more."""
COPY = "copy"
"""Key of `ReceiveFigures.num_bytes` for whole files; the other keys are kinds of manifests."""
UNAVAILABLE = (PieceMissing, PieceDamaged, ManifestError, WeightsError)
"""Errors after which the version is fetched in another way; others, such as a broken connection, end the attempt."""
Copy = Callable[[int, Path], Awaitable[None]]
"""Function that downloads the files of a version, given its number, into a folder; resumes partial files."""


class VersionCache:
    """Whole versions in a folder on this disk. All methods but `path_of` use the disk: call them in a thread.

    A version's folder is renamed into place once it is written, flushed and verified. Folders are named by number and
    digest, so that another run's versions are never mistaken for ours. A folder from an earlier process, or one that
    has changed since it was verified, is hashed before it is used.
    """

    def __init__(self, folder: Path, num_kept: int):
        self.folder, self._num_kept = folder.absolute(), num_kept
        self._verified: dict[Path, list[tuple[int, int, int]]] = {}
        """Inode, size and modification time of the files of each verified version, in order of their last request."""

    def path_of(self, number: int, digest: str) -> Path:
        return self.folder / f"{number:08d}-{blake3(digest.encode()).hexdigest()[:16]}"

    def numbers(self) -> list[int]:
        """Returns the numbers of the versions on this disk, from the names of their folders."""
        return [int(path.name.partition("-")[0]) for path in self.folder.glob("[0-9]*") if FOLDER.fullmatch(path.name)]

    def holds(self, path: Path, digest: str) -> bool:
        """Returns whether `path` holds the version with this digest; deletes the folder if its content is damaged."""
        if not path.exists():
            return False
        try:
            status = _file_status(path)
            if self._verified.pop(path, None) != status and folder_digest(path) != digest:
                raise ValueError(f"the digest is not the published {digest[:12]}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "%s was damaged and is deleted: %s",
                weights_file(path),
                " ".join(str(error).split()),
            )
            self.discard(path)
            return False
        self._verified[path] = status
        return True

    def mark_verified(self, path: Path) -> None:
        self._verified.pop(path, None)
        self._verified[path] = _file_status(path)

    def invalidate(self, path: Path) -> None:
        """Forgets that the version at `path` was verified, so that it is hashed again before its next use."""
        self._verified.pop(path, None)

    def discard(self, path: Path) -> None:
        self._verified.pop(path, None)
        doomed = path.with_name(f".{path.name}.old.draft")  # a kill then leaves no half under the real name
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def forget(self, needs: Mapping[Path, Path]) -> set[Path]:
        """Deletes old versions; returns the paths of those kept. Keeps the `num_kept` versions requested last and the
        bases of adapters among them. Versions from earlier processes count as requested before all others, in order of
        their numbers. `needs` maps an adapter's path to its base's."""
        requested = {path: rank for rank, path in enumerate(self._verified, start=1)}
        found = [path for path in self.folder.iterdir() if FOLDER.fullmatch(path.name)]
        found.sort(key=lambda path: (requested.get(path, 0), path.name), reverse=True)
        kept = set(found[: self._num_kept])
        kept |= {needs[path] for path in kept if path in needs}
        for path in found:
            if path not in kept:
                self.discard(path)
        for draft in self.folder.glob(".*.draft"):  # left from versions that were given up
            shutil.rmtree(draft, ignore_errors=True)
        return kept


def _file_status(folder: Path) -> list[tuple[int, int, int]]:
    found = [os.stat(file) for file in sorted(folder.iterdir())]
    return [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]


@dataclass
class ReceiveFigures:
    """Cost of fetching one version."""

    number: int
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes downloaded, by the kind of manifest that they belong to, or under `COPY` for whole files."""
    num_applied: int = 0
    """Number of manifests from which the version was assembled; 0: it came as whole files."""
    fetch_s: float = 0.0
    apply_s: float = 0.0


class Receiver:
    """Fetches published versions onto the disk of one worker."""

    def __init__(
        self,
        folder: Path,
        sources: Sources,
        trusted: Collection[str],
        num_kept: int = NUM_KEPT,
        *,
        copy: Copy | None = None,
        has_base: Callable[[str], bool] = lambda digest: False,
        report: Callable[[ReceiveFigures], None] = lambda figures: None,
        arrived: Callable[[], None] = lambda: None,
    ):
        """`copy` downloads whole files if there are no pieces (None: impossible). An adapter's base is fetched unless
        `has_base`, given its digest, says that the engine has it. `report` receives the figures of each version;
        `arrived` is called whenever `downloads.store` holds something new for peers."""
        self.cache = VersionCache(folder, num_kept)
        self.downloads = PieceDownloader(self.cache.folder, sources, trusted, arrived)
        self._copy, self._has_base, self._report = copy, has_base, report
        self._lock = asyncio.Lock()

    async def fetch(self, version: Version) -> Version:
        """Fetches a version unless it is on this disk; returns its record, with the path of its verified files here."""
        async with self._lock:
            try:
                path, base = await self._fetch(version)
                await in_thread(self._forget)
            except OSError as error:
                if isinstance(error, (OffbeatError, ConnectionError, TimeoutError)):
                    raise
                raise OffbeatError(
                    f"version {version.number} cannot be written to {self.cache.folder}: {error.strerror or error}; "
                    f"{remedy(error)}, then start the worker again"
                ) from error
            return replace(version, path=path, base=base)

    async def discard(self, version: Version) -> None:
        """Deletes a version that proved damaged, so that it is fetched again."""
        async with self._lock:
            await in_thread(self.cache.discard, self.cache.path_of(version.number, version.digest))

    async def _fetch(self, version: Version) -> tuple[Path, Path | None]:
        """Fetches a version; returns its path, and its base's path if it is an adapter whose base the engine lacks."""
        if not version.manifest:
            return await self._ensure(version.number, version.digest, None), None
        base = None
        try:
            manifest = await self.downloads.manifest(version.number, version.digest, version.manifest)
            if manifest.step != version.step:
                raise ManifestError(
                    f"its manifest says step {manifest.step}, but the coordinator says step {version.step}"
                )
            found = manifest.base if manifest.kind is Kind.ADAPTER else None
            if found is not None and not await in_thread(self._has_base, found.digest):
                base = await self.downloads.manifest(found.number, found.digest, found.manifest or "")
        except UNAVAILABLE as error:
            raise WeightsError(f"version {version.number} has no manifest that can be trusted: {error}") from error
        crash_here("manifest-kept")
        base_path = None if base is None else await self._ensure(base.number, base.digest, base)
        return await self._ensure(manifest.number, manifest.digest, manifest), base_path

    async def _ensure(self, number: int, digest: str, manifest: Manifest | None) -> Path:
        """Returns the path of a version; if it is not on this disk, assembles it or downloads its whole files."""
        path = self.cache.path_of(number, digest)
        if await in_thread(self.cache.holds, path, digest):
            return path
        if manifest is None and self._copy is None:
            raise OffbeatError(
                f"version {number} was published without a manifest, so this machine cannot fetch it; run the same "
                "version of Offbeat on all machines"
            )
        figures = ReceiveFigures(number)
        try:
            if manifest is None:
                await self._fetch_files(digest, path, figures)
            else:
                await self._assemble_or_fetch(manifest, path, figures)
        except UNAVAILABLE as error:
            raise WeightsError(f"version {number} cannot be fetched: {error}") from error
        self.cache.mark_verified(path)
        crash_here("version-built")
        self._report(figures)
        return path

    async def _assemble_or_fetch(self, manifest: Manifest, path: Path, figures: ReceiveFigures) -> None:
        try:
            await self._assemble(manifest, path, figures)
        except UNAVAILABLE as error:
            if self._copy is None or manifest.kind is Kind.ADAPTER:
                raise
            log.warning("version %d is downloaded as whole files, not as changes: %s", manifest.number, error)
            try:
                await self._fetch_files(manifest.digest, path, figures)
            except UNAVAILABLE as other:
                raise WeightsError(f"{error}; its whole files cannot be fetched either: {other}") from other

    async def _assemble(self, manifest: Manifest, path: Path, figures: ReceiveFigures) -> None:
        """Assembles a version from a base on this disk or, if that proves damaged, from the full version."""
        chain, base = await self._chain(manifest, may_use_local=True)
        try:
            return await self._apply(chain, base, path, figures)
        except WeightsError as error:
            if base is None:
                raise
            log.warning(
                "version %d is assembled again from a full version, because its base %s may be damaged: %s",
                manifest.number,
                base.name,
                error,
            )
            self.cache.invalidate(base)
        chain, _ = await self._chain(manifest, may_use_local=False)
        await self._apply(chain, None, path, figures)

    async def _chain(self, manifest: Manifest, *, may_use_local: bool) -> tuple[list[Manifest], Path | None]:
        """Returns the manifests to apply, in order, and the path of the local version that the first manifest builds
        on. The path is None if the first manifest needs no base, which is always so without `may_use_local`."""
        oldest = min(await in_thread(self.cache.numbers), default=manifest.number) if may_use_local else None
        chain = [manifest]
        while chain[0].kind is Kind.DELTA and (base := chain[0].base) is not None:
            path = self.cache.path_of(base.number, base.digest)
            if may_use_local and await in_thread(self.cache.holds, path, base.digest):
                return chain, path
            chain.insert(0, await self.downloads.manifest(base.number, base.digest))
        if oldest is not None and oldest < chain[0].number:
            return await self._chain_past_anchor(chain, oldest)
        return chain, None

    async def _chain_past_anchor(self, chain: list[Manifest], oldest: int) -> tuple[list[Manifest], Path | None]:
        """Replaces the full version that begins `chain` by deltas from a version on this disk, if such deltas exist and
        have fewer bytes. Returns the chain and that version's path, or the same chain and None. `oldest` is the number
        of the oldest version on this disk, where the search ends."""
        anchor, found = chain[0], chain[0]
        deltas: list[Manifest] = []
        while found.delta is not None or found.kind is Kind.DELTA:
            if found.delta is not None:
                found = await self.downloads.manifest(found.number, found.digest, found.delta)
            deltas.insert(0, found)
            num_bytes = sum(manifest.num_coded_bytes for manifest in deltas)
            if found.base is None or found.base.number < oldest or num_bytes >= anchor.num_coded_bytes:
                break
            path = self.cache.path_of(found.base.number, found.base.digest)
            if await in_thread(self.cache.holds, path, found.base.digest):
                return [*deltas, *chain[1:]], path
            found = await self.downloads.manifest(found.base.number, found.base.digest)
        return chain, None

    async def _apply(self, chain: list[Manifest], base: Path | None, path: Path, figures: ReceiveFigures) -> None:
        started_s = time.monotonic()
        figures.num_bytes += await self.downloads.pieces(chain)
        figures.num_applied = len(chain)
        crash_here("pieces-fetched")
        fetched_s = time.monotonic()
        figures.fetch_s += fetched_s - started_s
        await in_thread(assemble, chain, base, self.downloads.read, path)
        figures.apply_s += time.monotonic() - fetched_s

    async def _fetch_files(self, digest: str, path: Path, figures: ReceiveFigures) -> None:
        """Downloads a version as whole files to `path`; tries again if they arrive damaged."""
        assert self._copy is not None
        draft, started_s = path.with_name(f".{path.name}.copy.draft"), time.monotonic()
        figures.num_applied = 0
        for _ in range(MAX_ATTEMPTS):
            draft.mkdir(parents=True, exist_ok=True)
            num_before = _num_bytes(draft)
            await self._copy(figures.number, draft)
            figures.num_bytes[COPY] += max(_num_bytes(draft) - num_before, 0)
            if await in_thread(_put_in_place, draft, digest, path):
                figures.fetch_s += time.monotonic() - started_s
                return
            log.warning("version %d: the downloaded files do not have the published digest", figures.number)
        raise WeightsError(f"the files of version {figures.number} arrived damaged {MAX_ATTEMPTS} times")

    def _forget(self) -> None:
        """Deletes old versions with their manifests and pieces. Keeps the few versions requested last, and the bases of
        adapters among them."""
        known = self.downloads.known()
        paths = {entry: self.cache.path_of(found.number, found.digest) for entry, found in known.items()}
        needs = {
            paths[entry]: self.cache.path_of(found.base.number, found.base.digest)
            for entry, found in known.items()
            if found.kind is Kind.ADAPTER and found.base is not None
        }
        kept = self.cache.forget(needs)
        crash_here("half-forgotten")
        self.downloads.forget([entry for entry, path in paths.items() if path not in kept])


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _put_in_place(draft: Path, digest: str, path: Path) -> bool:
    """Renames `draft`, a folder of whole files, to `path` and returns True if it has the digest `digest`; otherwise
    deletes it and returns False."""
    try:
        if folder_digest(draft) != digest:
            raise ValueError("the digest is not the published one")
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        shutil.rmtree(draft)
        return False
    for file in draft.iterdir():
        fsync_file(file)
    replace_folder(draft, path)
    return True
