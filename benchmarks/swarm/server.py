"""A coordinator in a process of its own, on one core: `python -m benchmarks.swarm.server FOLDER --core 0`.

Real application, real parsing, real access checks. Behind them stands either the real coordinator, with its ledger,
rewards and a trainer that claims and publishes without learning anything; or, with --stand-in, one that hands out tasks
and acknowledges trajectories at once and remembers nothing. It prints where it serves and the workers' secrets as a
line of JSON, serves until its input ends, and then says what the ledger holds. Rewards run in a process that is not
bound to the core.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.common.first_version import write_weights
from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.config import from_dict
from offbeat.config.schema import Config
from offbeat.coordinator.api.server import Address, HttpServer
from offbeat.coordinator.api.state import ServedRun
from offbeat.coordinator.coordinator import Coordinator, CoordinatorSettings
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.launch import wiring
from offbeat.launch.run_folder import CONFIG, METRICS
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome
from offbeat.ledger.workers import Role, new_secret, secret_hash
from offbeat.tools.page.server import BESIDE_SHARE, PageApp
from offbeat.trajectory import Sampling, Task, Trajectory
from offbeat.weights.version import Version, WeightFolder

MAX_NEW_TOKENS = 448
NO_END_STEPS = 1_000_000
CLAIM_WITHIN_S = 600.0
TTL_S = 60.0


SETTINGS = {
    "run": {"steps": NO_END_STEPS},
    "batch": {"groups_per_step": 128, "group_size": 8},
    "rollout": {"max_new_tokens": MAX_NEW_TOKENS, "lease_s": TTL_S},
    "schedule": {"mode": "overlap"},
    "eval": {"every": 0},
}


class StandIn:
    """Answers as a coordinator does and stores nothing, which shows the cost of the server without a ledger."""

    def __init__(self, prompt: np.ndarray, ledger: Ledger):
        self.prompt, self.ledger = prompt, ledger
        self.settings = CoordinatorSettings(num_steps=0, max_new_tokens=MAX_NEW_TOKENS)
        self.seen: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)

    async def lease(self, worker: str, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        numbers = itertools.islice(self._numbers, capacity)
        tasks = tuple(Task(n, n // 8, self.prompt, n, self._sampling, fence=1) for n in numbers)
        return LeaseResponse(tasks, ttl_s=TTL_S)

    async def submit(self, worker: str, trajectory: Trajectory, fence: int) -> Outcome:
        return Outcome.STORED

    async def heartbeat(self, *_: object) -> Heartbeat:
        return Heartbeat()

    async def give_back(self, *_: object) -> None:
        pass

    def timed(self, *_: object) -> None:
        pass

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        await asyncio.sleep(wait_s)
        return None

    async def leave(self, worker: str) -> None:
        pass

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


async def train(coordinator: Coordinator, first: Version, metrics: Path) -> None:
    """Claims, publishes and commits without end, as fast as batches come; writes a row of metrics for each."""
    version = first
    for step in itertools.count():
        batch = await coordinator.claim(step, CLAIM_WITHIN_S)
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step + 1, "reward": 0.5, "samples": len(batch.groups), "attempt": 1}) + "\n")
        version = Version(version.number + 1, step + 1, version.number, first.digest, first.path)
        await coordinator.commit(step, version)


@asynccontextmanager
async def real(config: Config, folder: Path, ledger: Ledger, core: int | None) -> AsyncIterator[Coordinator]:
    async with AsyncExitStack() as stack:
        tokens, mixture = wiring.load_tokens(config), wiring.make_mixture(config, None)
        pool = await wiring.open_pool(config, mixture, folder / "rewards.log")
        stack.push_async_callback(pool.close)
        bind_to(core)  # after the pool, whose process is free to run elsewhere
        issuer = wiring.make_issuer(config, mixture, tokens)
        coordinator = wiring.make_coordinator(
            config, ledger, issuer, pool, tokens, WeightGarbageCollector(WeightFolder(folder / "none"))
        )
        stack.push_async_callback(coordinator.close)
        await coordinator.start()
        first = await asyncio.to_thread(write_weights, folder / "weights")
        await coordinator.publish(first)
        training = asyncio.create_task(train(coordinator, first, folder / METRICS))
        training.add_done_callback(_complain)
        yield coordinator
        training.cancel()
        await asyncio.wait({training})


@asynccontextmanager
async def stand_in(ledger: Ledger, core: int | None) -> AsyncIterator[Coordinator]:
    bind_to(core)
    yield cast(Coordinator, StandIn(np.arange(1, 9, dtype=np.int32), ledger))


def bind_to(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


def _complain(training: asyncio.Task[None]) -> None:
    if not training.cancelled() and (error := training.exception()):
        print(f"the trainer ended: {error}", file=sys.stderr, flush=True)


async def serve(options: argparse.Namespace) -> None:
    folder, config = options.folder, from_dict(SETTINGS)
    folder.mkdir(parents=True)
    path = folder / "ledger.sqlite"
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(wiring.open_ledger(config, path))
        chosen = stand_in(ledger, options.core) if options.stand_in else real(config, folder, ledger, options.core)
        coordinator = await stack.enter_async_context(chosen)
        secrets = await coordinator.call(_enrol, ledger, options.workers)
        (folder / CONFIG).write_text(json.dumps(SETTINGS))
        page = PageApp([folder], options.page, share=BESIDE_SHARE) if options.page else None
        served = ServedRun(coordinator, "crowd", {}, str(path), WeightFolder(folder / "none"), page=page)
        server = HttpServer(served, Address())
        await server.start()
        stack.push_async_callback(server.stop)
        server.open()
        print(json.dumps({"url": server.url, "secrets": secrets}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        counts = await coordinator.call(ledger.counts)
        verdict = [] if options.stand_in else (await coordinator.call(ledger.verify)).violations
        print(json.dumps({"accepted": counts.trajectories.accepted, "violations": list(map(str, verdict))}), flush=True)


def _enrol(ledger: Ledger, count: int) -> list[str]:
    """Returns the secrets of workers that joined directly, because joins over HTTP are slowed down on purpose."""
    made = [new_secret() for _ in range(count)]
    for number, secret in enumerate(made):
        ledger.redeem(ledger.issue_token(Role.ROLLOUT, 60), f"w{number}", {}, secret_hash(secret))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="A coordinator to put under load.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--page", metavar="TOKEN", help="serve the run's page, too, to those who have the token")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
