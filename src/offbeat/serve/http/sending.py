"""A trainer's versions on their way to a coordinator on another machine.

Pieces go first, those that are not there yet; then the manifest that names them; the caller publishes. A trainer that
died on the way sends what is missing when it tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from blake3 import blake3

from offbeat.serve.http import wire
from offbeat.serve.http.connection import Connection
from offbeat.weights.manifest import Manifest
from offbeat.weights.pieces import PieceStore
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version

CHUNK_BYTES = 1024 * 1024
NUM_PARALLEL = 4
"""Pieces on their way at a time: a line whose answers take long is filled all the same."""


async def send_pieces(connection: Connection, store: PieceStore, version: Version, signer: str) -> None:
    """All that a version consists of, from a store of this machine."""
    await _send(connection, store, version.number, version.manifest, signer)


async def _send(connection: Connection, store: PieceStore, number: int, digest: str, signer: str) -> None:
    """A manifest and all that it names, which comes first."""
    sealed = await asyncio.to_thread(store.get_manifest, number, digest)
    manifest = Manifest.decode(open_sealed(sealed, [signer]))
    if manifest.delta is not None:
        await _send(connection, store, number, manifest.delta, signer)
    if (base := manifest.base) is not None and base.number == number and base.manifest is not None:
        await _send(connection, store, number, base.manifest, signer)  # with the first adapter that stands on it
    call = wire.MissingCall(pieces=[piece.digest for piece in manifest.pieces])
    missing = iter((await connection.call("/v1/pieces/missing", call, wire.Missing)).pieces)

    async def carry() -> None:
        for digest in missing:
            data = await asyncio.to_thread(store.get, digest)
            await connection.put(f"/v1/pieces/{digest}", data, len(data), bytes.fromhex(digest))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_PARALLEL):
            group.create_task(carry())
    await connection.put(f"/v1/manifests/{number}/{digest}", sealed, len(sealed), blake3(sealed).digest())


async def send_files(connection: Connection, version: Version) -> None:
    """A version that is published as whole files."""
    for path in sorted(version.path.iterdir()):
        await _send_file(connection, f"/v1/weights/{version.number}/{path.name}", path)


async def _send_file(connection: Connection, where: str, path: Path) -> None:
    digest = await asyncio.to_thread(lambda: blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
    await connection.put(where, lambda: _chunks(path), path.stat().st_size, digest)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open, path, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
