"""Transfers weights: downloads manifests, pieces and files from the coordinator, and uploads manifests and pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from blake3 import blake3

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.errors import OffbeatError
from offbeat.files import cannot_write
from offbeat.ledger.errors import Unknown
from offbeat.weights.download import Sources
from offbeat.weights.manifest import Manifest
from offbeat.weights.piece_store import PieceMissing, PieceStore
from offbeat.weights.receive import ReceiveFigures, Receiver
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version

NUM_PARALLEL = 4
"""Number of pieces sent concurrently, to use the full bandwidth of a network with long round trips."""


class CoordinatorSources:
    """Downloads manifests, pieces and whole files from the coordinator, for `offbeat.weights.receive`."""

    def __init__(self, connection: Connection):
        self._connection = connection

    async def signers(self) -> list[str]:
        """Returns the public keys that sign the run's manifests."""
        return (await self._connection.get("/v1/signers", wire.Signers)).keys

    async def peers(self, site: str, host: str, port: int, root_bytes_per_s: float | None) -> wire.SourceList:
        """Tells the coordinator where this worker serves pieces of weights (`host`, `port`). Returns the peers (other
        workers) from which to fetch pieces before asking the root (coordinator or store).

        `port` = 0: the worker serves no pieces. `host` = "": its address is the one from which it calls.
        `root_bytes_per_s` is the rate measured from the root; None: not measured.
        """
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

    async def files(self, number: int, into: Path) -> None:
        """Downloads all files of a version into folder `into`; the caller must verify them."""
        try:
            for file in (await self._connection.get(f"/v1/weights/{number}", wire.WeightFiles)).files:
                await fill(self._connection, f"/v1/weights/{number}/{file.name}", into / file.name, file.num_bytes)
        except Unknown as error:
            raise PieceMissing(str(error)) from error


async def fill(connection: Connection, path: str, part: Path, num_bytes: int) -> None:
    """Downloads a file of `num_bytes` bytes from the coordinator's URL path `path` into the file `part`. Continues
    after the bytes that `part` already has, and resumes whenever the connection breaks."""
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
            if now > have:  # after progress, the patience starts anew
                retry = connection.retry(f"GET {path}")
            await retry.pause(f"the download broke off at {now} of {num_bytes} bytes: {type(error).__name__}: {error}")


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


class CoordinatorReceiver(Receiver):
    """Fetches the versions of a run onto this disk from a remote coordinator."""

    def __init__(
        self,
        connection: Connection,
        folder: Path,
        *,
        sources: Sources | None = None,
        before: Callable[[], Awaitable[object]] | None = None,
        has_base: Callable[[str], bool] = lambda digest: False,
        report: Callable[[ReceiveFigures], None] = lambda figures: None,
        arrived: Callable[[], None] = lambda: None,
    ):
        """`sources` provides the pieces of weights; None: the coordinator does. `before` is awaited before each fetch
        of a version that has a manifest. The other arguments are those of `Receiver`."""
        self.coordinator, self._before = CoordinatorSources(connection), before
        self._signers = set[str]()
        super().__init__(
            folder,
            sources or self.coordinator,
            self._signers,
            copy=self.coordinator.files,
            has_base=has_base,
            report=report,
            arrived=arrived,
        )

    async def fetch(self, version: Version) -> Version:
        if version.manifest:
            self._signers.update(await self.coordinator.signers())
            if self._before is not None:
                await self._before()
        return await super().fetch(version)


async def send_version(connection: Connection, store: PieceStore, number: int, digest: str, signer: str) -> None:
    """Sends the manifest `digest` of version `number`, signed with the key `signer`, from `store` to the coordinator.
    Before the manifest, sends what it refers to: the manifests of the version's delta and of an adapter's base weights,
    and the pieces that the coordinator lacks. Pieces that arrived before a crash are not sent again."""
    sealed = await asyncio.to_thread(store.get_manifest, number, digest)
    manifest = Manifest.decode(open_sealed(sealed, [signer]))
    if manifest.delta is not None:
        await send_version(connection, store, number, manifest.delta, signer)
    if (base := manifest.base) is not None and base.number == number and base.manifest is not None:
        await send_version(connection, store, number, base.manifest, signer)  # the base is sent with its first adapter
    call = wire.MissingCall(pieces=[piece.digest for piece in manifest.pieces])
    missing = iter((await connection.call("/v1/pieces/missing", call, wire.Missing)).pieces)

    async def send() -> None:
        for digest in missing:
            data = await asyncio.to_thread(store.get, digest)
            await connection.put(f"/v1/pieces/{digest}", data, bytes.fromhex(digest))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_PARALLEL):
            group.create_task(send())
    await connection.put(f"/v1/manifests/{number}/{digest}", sealed, blake3(sealed).digest())
