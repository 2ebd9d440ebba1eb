"""Manifests and pieces of versions over HTTP: handed out to workers, taken in from a trainer elsewhere.

A piece is named by its digest and a manifest is signed, so that whoever receives one can check it. Taken in are pieces
that are what their name says, and manifests that a trainer of this run has signed; a version is published only once its
manifest and all its pieces are on disk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.serve.http.limits import MIB
from offbeat.serve.http.refusals import Refusal
from offbeat.weights.manifest import Manifest, ManifestError, manifest_digest
from offbeat.weights.pieces import PieceDamaged, PieceMissing, PieceStore, StoreError
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version

DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_PIECE_BYTES = 32 * MIB
MAX_MANIFEST_BYTES = 64 * MIB
CHUNK_BYTES = 4 * MIB


class Pieces:
    """The run's pieces, as callers see them."""

    def __init__(
        self,
        store: PieceStore,
        published: Callable[[int], Version | None],
        signers: Callable[[], Collection[str]],
    ):
        self.store, self._published, self._signers = store, published, signers

    # --- out ---

    async def manifest(self, number: int, digest: str | None = None) -> bytes:
        """The sealed manifest of a published version; by its digest also that of what changed in an anchor, or of what
        an adapter stands on."""
        version = self._published(number)
        if version is None:
            raise Unknown(f"version {number}: never published")
        if not version.manifest:
            raise Unknown(f"version {number}: published as a whole file, without a manifest")
        try:
            return await asyncio.to_thread(self.store.get_manifest, number, checked(digest or version.manifest))
        except PieceMissing:
            raise Unknown(f"version {number}: its manifest is no longer kept") from None
        except PieceDamaged as error:
            raise Unknown(f"version {number}: {error}") from error

    async def size(self, digest: str) -> int:
        size = await asyncio.to_thread(self.store.size, checked(digest))
        if size is None:
            raise Unknown(f"piece {digest}: not here")
        return size

    async def bytes_of(self, digest: str, start: int, stop: int) -> AsyncIterator[bytes]:
        """A piece from one byte to another; the receiver finds out by its name whether it is whole."""
        while start < stop:
            end = min(start + CHUNK_BYTES, stop)
            yield await asyncio.to_thread(self.store.get, digest, start, end)
            start = end

    # --- in ---

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Those of some pieces that are not here."""
        for digest in digests:
            checked(digest)
        return await asyncio.to_thread(lambda: [digest for digest in digests if self.store.size(digest) is None])

    async def take_piece(self, digest: str, data: bytes) -> None:
        """Keeps a piece, which the caller has compared with its name."""
        await self._write(self.store.put, digest, data)

    async def take_manifest(self, number: int, digest: str, sealed: bytes) -> None:
        """Keeps a manifest once all that it names is on disk; nobody is told of it until its version is published."""
        await self._check_whole(self._opened(sealed, number, checked(digest)))
        known = self._published(number)
        if known is not None and known.manifest != digest and not await self._is_here(number, digest):
            raise Conflict(f"version {number}: already published, and not with this manifest")
        await self._write(self.store.sync)
        await self._write(self.store.put_manifest, number, digest, sealed)

    async def check(self, version: Version) -> None:
        """Refuses a version that is about to be published unless its manifest and all of its pieces are here."""
        if not version.manifest:
            return
        try:
            sealed = await asyncio.to_thread(self.store.get_manifest, version.number, version.manifest)
        except (PieceMissing, PieceDamaged) as error:
            raise Refused(f"version {version.number}: its manifest was never sent: {error}") from error
        manifest = self._opened(sealed, version.number, version.manifest)
        told = (version.step, version.parent, version.digest)
        if (manifest.step, manifest.parent, manifest.digest) != told:
            raise Refused(f"version {version.number}: its manifest speaks of another step, parent or digest")
        await self._check_whole(manifest)

    async def _check_whole(self, manifest: Manifest) -> None:
        """Refuses a manifest unless all that it names is here."""
        missing = await self.missing([piece.digest for piece in manifest.pieces])
        if missing:
            raise Refused(f"version {manifest.number}: {len(missing)} pieces were never sent, such as {missing[0]}")
        if manifest.delta is not None and not await self._is_here(manifest.number, manifest.delta):
            raise Refused(f"version {manifest.number}: the manifest of what changed in it was never sent")
        base = manifest.base
        if base is None or base.manifest is None or base.number != manifest.number:
            return
        if not await self._is_here(base.number, base.manifest):
            raise Refused(f"version {manifest.number}: the manifest of what it stands on was never sent")

    async def _is_here(self, number: int, digest: str) -> bool:
        return (number, digest) in await asyncio.to_thread(self.store.list_manifests)

    def _opened(self, sealed: bytes, number: int, digest: str) -> Manifest:
        try:
            data = open_sealed(sealed, self._signers())
            manifest = Manifest.decode(data)
        except ManifestError as error:
            raise Refusal(400, f"version {number}: {error}") from error
        if manifest.number != number or manifest_digest(data) != digest:
            raise Refusal(400, f"version {number}: the manifest is that of version {manifest.number}, or was changed")
        return manifest

    async def _write(self, function: Callable[..., None], *args: object) -> None:
        try:
            await asyncio.to_thread(function, *args)
        except StoreError as error:
            raise Refusal(507, str(error)) from error


def checked(digest: str) -> str:
    """The name of a piece, if it is one."""
    if DIGEST.fullmatch(digest) is None:
        raise Unknown(f"piece {digest[:80]!r}: not the name of a piece")
    return digest
