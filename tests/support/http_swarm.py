"""A coordinator behind a real socket, workers that reach it over HTTP, and a trainer that learns nothing: one loop."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import torch

from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker, join
from offbeat.config import from_dict
from offbeat.coordinator.api.server import Address, HttpServer
from offbeat.coordinator.api.state import ServedRun
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.launch import wiring
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.ledger.workers import Role
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Version, WeightFolder
from offbeat.worker.spool import Spool
from offbeat.worker.worker import Worker

GROUPS_PER_STEP, GROUP_SIZE = 3, 4
WITHIN_S = 120.0


class Swarm:
    """What `serving` yields."""

    def __init__(self, folder: Path, coordinator: Coordinator, server: HttpServer, vocab_size: int):
        self.folder, self.coordinator, self.server, self.vocab_size = folder, coordinator, server, vocab_size
        self.num_weights = 4

    def engine(self, name: str, **settings) -> PacedEngine:
        lengths = LogNormalLength(median_tokens=20, sigma=0.8, max_tokens=64)
        defaults = {"num_slots": 6, "base_s": 0.01, "lengths": lengths}
        return PacedEngine(PacedSettings(vocab_size=self.vocab_size, **{**defaults, **settings}), worker=name)

    async def token(self) -> str:
        return await self.coordinator.call(self.coordinator.ledger.issue_token, Role.ROLLOUT, 5.0)

    @asynccontextmanager
    async def worker(self, name: str, url: str, *, shares_disk: bool = True, **settings) -> AsyncIterator[Worker]:
        """A worker that has joined at `url`, with a spool of its own; the caller runs it."""
        async with AsyncExitStack() as stack:
            connection = Connection(url)
            stack.push_async_callback(connection.close)
            await join(connection, await self.token(), name)
            client = RemoteWorker(connection, self.folder / name / "weights", shares_disk=shares_disk)
            spool = Spool(self.folder / name / "spool")
            stack.callback(spool.close)
            engine = self.engine(name, **settings)
            stack.push_async_callback(engine.close)
            yield Worker(name, engine, client, spool=spool)

    async def train(self, num_steps: int, pause_s: float = 0.0) -> None:
        """Claims, publishes, commits; then ends the run."""
        store, made = Publisher(self.folder / "weights"), self.coordinator

        def write(number: int, step: int, parent: int | None) -> Version:
            return store.write(number, step, parent, {"w": torch.full((self.num_weights,), float(number))})

        version = write(await made.next_version(), 0, None)
        await made.publish(version)
        for step in range(num_steps):
            await made.claim(step, WITHIN_S)
            await asyncio.sleep(pause_s)
            version = write(await made.next_version(), step + 1, version.number)
            await made.commit(step, version)
        made.end()

    def ask(self, query: str) -> list[tuple]:
        """What the ledger's tables say."""
        with closing(sqlite3.connect(f"file:{self.folder / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            if look():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    folder: Path,
    num_steps: int,
    *,
    lease_s: float,
    max_attempts: int = 3,
    min_group: int = 2,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Swarm]:
    """In the end the ledger's laws must hold."""
    config = from_dict(
        {
            "run": {"steps": num_steps},
            "batch": {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "min_group": min_group},
            "eval": {"every": 0},
            "rollout": {"max_new_tokens": 64, "lease_s": lease_s, "max_attempts": max_attempts},
            "schedule": {"mode": "overlap", "max_staleness": 4},
        }
    )
    async with AsyncExitStack() as stack:
        tokens = wiring.load_tokens(config)
        mixture = wiring.make_mixture(config, None)
        ledger = stack.enter_context(
            Ledger(
                folder / "ledger.sqlite",
                LedgerTerms(
                    min_group=min_group,
                    max_attempts=max_attempts,
                    max_staleness=config.schedule.bound,
                    groups_per_step=GROUPS_PER_STEP,
                ),
                wall_clock=wall_clock,
            )
        )
        pool = await wiring.open_pool(config, mixture, folder / "rewards.log")
        stack.push_async_callback(pool.close)
        weights = WeightFolder(folder / "weights")
        issuer = wiring.make_issuer(config, mixture, tokens)
        made = wiring.make_coordinator(config, ledger, issuer, pool, tokens, WeightGarbageCollector(weights))
        stack.push_async_callback(made.close)
        await made.start(keep_leases=True)
        server = HttpServer(ServedRun(made, "a", {}, str(folder / "ledger.sqlite"), weights), Address())
        await server.start()
        stack.push_async_callback(server.stop)
        server.open()
        yield Swarm(folder, made, server, tokens.vocab_size)
        assert (await made.call(ledger.verify)).violations == ()  # on the thread that may still be writing
