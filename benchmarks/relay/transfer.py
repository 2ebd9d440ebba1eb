"""Sends one version to several receivers, each way on the same links."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from benchmarks import report
from benchmarks.relay.link import Link
from offbeat.errors import OffbeatError
from offbeat.weights.download import PieceDownloader
from offbeat.weights.manifest import Coding, Kind, Manifest, Part, PieceEntry, TensorEntry, tensors_digest
from offbeat.weights.peer_server import PeerServer
from offbeat.weights.peers import PeerSources
from offbeat.weights.piece_store import FolderStore, PieceMissing
from offbeat.weights.relay_tree import ROOT, RelayNode, RelayTree

say = partial(report.say, "relay")
NUM_RECEIVERS = 6
FASTER = 3.0
KEY = "benchmark"
WAYS = ("alone", "relays", "all from the sender")


@dataclass(frozen=True)
class Sizes:
    rounds: int
    num_pieces: int
    piece_bytes: int
    slow_bytes_per_s: float

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes


# At such rates six receivers leave half a core free: it is lines that should be slow here, not machines.
FULL = Sizes(rounds=5, num_pieces=40, piece_bytes=160 * 1024, slow_bytes_per_s=2e6)
QUICK = Sizes(rounds=2, num_pieces=40, piece_bytes=80 * 1024, slow_bytes_per_s=2e6)


@dataclass(frozen=True)
class Sent:
    """A version that was sent in one way."""

    seconds: float
    cpu_s: float
    slow_link_copies: float
    """Bytes that crossed the slow link, over those of the version."""
    depth: int


async def knows_key(key: str) -> bool:
    return key == KEY


class Nowhere:
    """Sources of the sender, which has nobody to fetch from."""

    async def manifest(self, number: int, digest: str) -> bytes:
        raise PieceMissing(f"manifest {number}: the sender did not give it")

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        raise PieceMissing(f"piece {digest}: the sender did not give it")


class Worker:
    """The parts with which a worker receives versions and passes them on."""

    def __init__(self, folder: Path, sender: Link):
        self._root = PeerSources(Nowhere())
        self._root.use({sender.url: KEY})
        self.sources = PeerSources(self._root)
        self.incoming = PieceDownloader(folder, self.sources, [], self._arrived)
        self.server = PeerServer(
            self.incoming.store,
            knows_key,
            expects=lambda digest: digest in self.incoming.expected,
            arrived=self.incoming.num_bytes_arrived,
        )

    def _arrived(self) -> None:
        self.server.notify()

    async def __aenter__(self) -> Worker:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        await self.sources.close()
        await self._root.close()


def version_of(sizes: Sizes, store: FolderStore) -> Manifest:
    """Puts a version with one tensor per piece into the sender's store."""
    tensors, pieces = [], []
    for number in range(sizes.num_pieces):
        data = os.urandom(sizes.piece_bytes)
        digest = blake3(data).hexdigest()
        store.put(digest, data)
        pieces.append(PieceEntry(digest, len(data)))
        part = Part(Coding.DENSE, digest, number, 0, len(data))
        tensors.append(TensorEntry(f"tensor{number:04d}", "U8", [len(data)], [part]))
    store.sync()
    return Manifest(
        number=1, step=0, parent=None, digest=tensors_digest(tensors), kind=Kind.FULL, tensors=tensors, pieces=pieces
    )


async def send(way: str, manifest: Manifest, server: PeerServer, folder: Path, sizes: Sizes) -> Sent:
    num_receivers = 1 if way == "alone" else NUM_RECEIVERS
    async with AsyncExitStack() as stack:
        slow = await stack.enter_async_context(Link(server.port, sizes.slow_bytes_per_s))
        workers, uplinks, tree = {}, {}, RelayTree()
        for name in (f"receiver{number}" for number in range(num_receivers)):
            workers[name] = await stack.enter_async_context(Worker(folder / name, slow))
            port, rate = workers[name].server.port, FASTER * sizes.slow_bytes_per_s
            uplinks[name] = await stack.enter_async_context(Link(port, rate))
            tree.put(RelayNode(name, "far away"))
        if way == "relays":
            for name, worker in workers.items():
                worker.sources.use({uplinks[other].url: KEY for other in tree.sources(name) if other != ROOT})
        start_s, cpu_s = time.monotonic(), _cpu_s()
        await asyncio.gather(*(worker.incoming.pieces([manifest]) for worker in workers.values()))
        seconds, cpu_s = time.monotonic() - start_s, _cpu_s() - cpu_s
        for name, worker in workers.items():
            if sorted(worker.incoming.store.list_pieces()) != sorted(piece.digest for piece in manifest.pieces):
                raise OffbeatError(f"{way}: {name} has not all the pieces")
        depth = max(len(tree.sources(name)) for name in workers) if way == "relays" else 1
        return Sent(seconds, cpu_s, slow.num_bytes / sizes.num_bytes, depth)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(folder: Path, sizes: Sizes) -> dict[str, list[Sent]]:
    """In each round, sends a new version in each way in turn."""
    found: dict[str, list[Sent]] = {way: [] for way in WAYS}
    warm_up = Sizes(1, 8, 64 * 1024, sizes.slow_bytes_per_s)
    for number, at in enumerate([warm_up, *[sizes] * sizes.rounds]):
        store = FolderStore(folder / "sender")
        manifest = version_of(at, store)
        server = PeerServer(store, knows_key)
        await server.start()
        try:
            for way in WAYS:
                sent = await send(way, manifest, server, folder / way, at)
                shutil.rmtree(folder / way)
                if at is not warm_up:
                    found[way].append(sent)
                    say(f"round {number}, {way}: {sent.seconds:.2f} s, {sent.slow_link_copies:.2f} copies")
        finally:
            await server.stop()
            shutil.rmtree(folder / "sender")
    return found
