"""Weights over HTTP: sends manifests, pieces and files to workers; receives manifests and pieces from a remote trainer.

The coordinator accepts a piece only if its digest matches its name, and a manifest only if a trainer of this run signed
it. A version is published only once its manifest and all its pieces are on disk. A version of a trainer on this machine
may have no manifest: remote workers then download its files.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from offbeat.client.wire import WeightFile
from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.limits import MIB
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.weights.manifest import Manifest, ManifestError, manifest_digest
from offbeat.weights.piece_store import PieceDamaged, PieceMissing, PieceStore, StoreError
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version, WeightFolder

FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Allowed file names. Without a path separator or leading dot, they cannot lead out of the version's folder or to a
file that is still being written."""
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_PIECE_BYTES = 32 * MIB
MAX_MANIFEST_BYTES = 64 * MIB
CHUNK_BYTES = 4 * MIB


class Weights:
    """Sends and receives the weights of a run's versions."""

    def __init__(
        self,
        folder: WeightFolder,
        store: PieceStore,
        published: Callable[[int], Version | None],
        signers: Callable[[], Collection[str]],
    ):
        self.folder, self.store, self._published, self._signers = folder, store, published, signers

    # --- sending ---

    def _version(self, number: int) -> Version:
        version = self._published(number)
        if version is None:
            raise Unknown(f"version {number} was never published in this run")
        return version

    async def files(self, number: int) -> list[WeightFile]:
        """Returns the names and sizes of a published version's files."""
        found = await asyncio.to_thread(lambda: sorted(self._version(number).path.glob("*")))
        files = [path for path in found if path.is_file() and FILE.fullmatch(path.name)]
        if not files:
            raise Unknown(f"the weights of version {number} are no longer stored; load a newer version")
        return [WeightFile(path.name, path.stat().st_size) for path in files]

    def find_file(self, number: int, name: str) -> tuple[Path, int]:
        """Returns the path and size in bytes of one file of a published version."""
        if FILE.fullmatch(name) is None:
            raise Unknown(f"{name[:80]!r} is not a valid name of a weight file")
        path = self._version(number).path / name
        try:
            return path, path.stat().st_size
        except FileNotFoundError:
            raise Unknown(f"version {number} has no file {name}") from None

    async def manifest(self, number: int, digest: str | None = None) -> bytes:
        """Returns a sealed (signed) manifest of a published version. `digest` names the manifest, for example that of
        the version's delta or of an adapter's base weights; None: the main manifest."""
        version = self._version(number)
        if not version.manifest:
            raise Unknown(f"version {number} was published as whole files, without a manifest; download its files")
        try:
            return await asyncio.to_thread(self.store.get_manifest, number, checked(digest or version.manifest))
        except PieceMissing:
            raise Unknown(f"the manifest of version {number} is no longer stored; load a newer version") from None
        except PieceDamaged as error:
            raise Unknown(f"version {number}: {error}") from error

    async def piece_size(self, digest: str) -> int:
        size = await asyncio.to_thread(self.store.size, checked(digest))
        if size is None:
            raise Unknown(f"piece {digest} is not stored here")
        return size

    async def piece_bytes(self, digest: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yields bytes `start` to `stop` of a piece, unchecked: the receiver verifies the piece against its name."""
        while start < stop:
            end = min(start + CHUNK_BYTES, stop)
            yield await asyncio.to_thread(self.store.get, digest, start, end)
            start = end

    # --- receiving ---

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Returns the members of `digests` whose pieces are not stored yet."""
        for digest in digests:
            checked(digest)
        return await asyncio.to_thread(lambda: [digest for digest in digests if self.store.size(digest) is None])

    async def store_piece(self, digest: str, data: bytes) -> None:
        """Stores a piece. The caller must have checked `data` against `digest`."""
        await self._write(self.store.put, digest, data)

    async def store_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        """Stores a manifest, after checking that everything it names is on disk. Workers cannot see the manifest before
        its version is published."""
        await self._check_whole(self._opened(sealed, number, checked(digest)))
        known = self._published(number)
        if known is not None and known.manifest != digest and not await self._is_here(number, digest):
            raise Conflict(f"version {number} was already published with another manifest")
        await self._write(self.store.sync)
        await self._write(self.store.put_manifest, number, digest, sealed)

    async def check_complete(self, version: Version) -> Version:
        """Returns `version` with the path of its weights on this machine. Raises an error if the version cannot be
        published, because a part of its weights is not stored here or its manifest is not valid."""
        if version.manifest:
            await self._check_manifest(version)
        elif (known := self._published(version.number)) is not None:  # published again; the ledger compares the two
            return replace(version, path=known.path)
        elif not await asyncio.to_thread(self.folder.path(version.number).is_dir):
            raise Refused(f"version {version.number} cannot be published: its weights were never sent")
        return replace(version, path=self.folder.path(version.number))

    async def _check_manifest(self, version: Version) -> None:
        try:
            sealed = await asyncio.to_thread(self.store.get_manifest, version.number, version.manifest)
        except (PieceMissing, PieceDamaged) as error:
            raise Refused(
                f"version {version.number} cannot be published: its manifest is missing or damaged: {error}"
            ) from error
        manifest = self._opened(sealed, version.number, version.manifest)
        named = (version.step, version.parent, version.digest)
        if (manifest.step, manifest.parent, manifest.digest) != named:
            raise Refused(f"version {version.number} differs from its manifest in step, parent or digest")
        await self._check_whole(manifest)

    async def _check_whole(self, manifest: Manifest) -> None:
        """Raises `Refused` if a piece or manifest that `manifest` names is not stored."""
        missing = await self.missing([piece.digest for piece in manifest.pieces])
        if missing:
            raise Refused(f"{len(missing)} pieces of version {manifest.number} were never sent, such as {missing[0]}")
        if manifest.delta is not None and not await self._is_here(manifest.number, manifest.delta):
            raise Refused(f"the delta manifest of version {manifest.number} was never sent")
        base = manifest.base
        if base is None or base.manifest is None or base.number != manifest.number:
            return
        if not await self._is_here(base.number, base.manifest):
            raise Refused(f"the base manifest of version {manifest.number} was never sent")

    async def _is_here(self, number: int, digest: str) -> bool:
        return (number, digest) in await asyncio.to_thread(self.store.list_manifests)

    def _opened(self, sealed: bytes, number: int, digest: str) -> Manifest:
        try:
            data = open_sealed(sealed, self._signers())
            manifest = Manifest.decode(data)
        except ManifestError as error:
            raise Refusal(400, f"version {number}: {error}") from error
        if manifest.number != number or manifest_digest(data) != digest:
            raise Refusal(400, f"the manifest sent for version {number} is not the one that the request names")
        return manifest

    async def _write(self, function: Callable[..., None], *args: object) -> None:
        try:
            await asyncio.to_thread(function, *args)
        except StoreError as error:
            raise Refusal(507, str(error)) from error


async def file_bytes(path: Path, start: int, stop: int) -> AsyncIterator[bytes]:
    """Yields bytes `start` to `stop` of a file, even if the file is deleted meanwhile."""
    with await asyncio.to_thread(open, path, "rb") as file:
        while start < stop:
            chunk = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK_BYTES, stop - start), start)
            if not chunk:
                raise OSError(f"{path} ends at byte {start}, but its bytes up to {stop} were requested")
            start += len(chunk)
            yield chunk


def checked(digest: str) -> str:
    """Returns `digest` if it is written as 64 hexadecimal digits in lower case; else raises `Unknown`."""
    if DIGEST.fullmatch(digest) is None:
        raise Unknown(f"{digest[:80]!r} is not a digest; it must have 64 hexadecimal digits in lower case")
    return digest
