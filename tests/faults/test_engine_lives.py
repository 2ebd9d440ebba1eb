"""An engine that dies under its worker, over real HTTP: the worker lives on, and nothing is lost or done twice."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from http_swarm import GROUP_SIZE, GROUPS_PER_STEP, serving, until

from benchmarks.chaos.fault_proxy import FaultProxy
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker, join
from offbeat.config import from_dict
from offbeat.engines.protocol import EngineDied, Generation, Request
from offbeat.launch.joining import JoinedRun
from offbeat.launch.stopping import Stopping
from offbeat.launch.worker_role import WorkerSupervisor
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.worker.progress import WorkerProgress
from offbeat.worker.spool import Spool
from offbeat.worker.worker import WorkerMetrics

NUM_STEPS = 4
NUM_TASKS = NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
LONG_LEASE_S = 300.0
"""Longer than a test may take: what is not given up is not trained in time."""
WITHIN_S = 100.0


class Mortal(PacedEngine):
    """An engine whose next step fails once it is told to."""

    def __init__(self, settings: PacedSettings):
        self.is_doomed, self.num_running = False, 0
        super().__init__(settings, worker="w", sleep=self._sleep_or_die)

    async def generate(self, request: Request) -> Generation:
        self.num_running += 1
        try:
            return await super().generate(request)
        finally:
            self.num_running -= 1

    async def _sleep_or_die(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.is_doomed:
            raise RuntimeError("the device is on fire")


class Engines:
    """Paced engines, one after the other; implements `offbeat.launch.engine_parts.Engines`."""

    has_next = True

    def __init__(self, vocab_size: int):
        lengths = LogNormalLength(median_tokens=20, sigma=0.8, max_tokens=64)
        self.settings = PacedSettings(vocab_size=vocab_size, num_slots=6, base_s=0.01, lengths=lengths)
        self.opened: list[Mortal] = []
        self.buried: list[str] = []
        self.said: list[str] = []
        self.may_open, self.is_gone = asyncio.Event(), asyncio.Event()
        self.may_open.set()

    async def open(self) -> Mortal:
        await self.may_open.wait()
        self.opened.append(Mortal(self.settings))
        return self.opened[-1]

    async def wait_exited(self) -> EngineDied:
        await self.is_gone.wait()
        self.is_gone.clear()
        return EngineDied("its process was killed")

    async def dispose(self, error: EngineDied) -> None:
        self.buried.append(str(error))

    async def close(self) -> None:
        for engine in self.opened:
            await engine.close()

    def log(self, text: str) -> None:
        self.said.append(text)


@asynccontextmanager
async def alive(swarm, url: str):
    """A worker through its engines' lives, as `offbeat worker` runs it."""
    async with AsyncExitStack() as stack:
        connection = Connection(url)
        stack.push_async_callback(connection.close)
        await join(connection, await swarm.token(), "w")
        spool = Spool(swarm.folder / "w" / "spool")
        stack.callback(spool.close)
        engines, metrics = Engines(swarm.vocab_size), WorkerMetrics()
        stack.push_async_callback(engines.close)

        def new_client() -> RemoteWorker:
            return RemoteWorker(connection, swarm.folder / "w" / "weights", shares_disk=True, figures=metrics.totals)

        member = JoinedRun(connection, "w", "a", from_dict({}))
        progress = WorkerProgress("w", metrics, lambda text: None)
        yield WorkerSupervisor(member, engines, spool, metrics, new_client, Stopping(), progress), engines


def leased(swarm) -> list[tuple]:
    return swarm.ask("SELECT id, fence FROM tasks WHERE state = 'leased'")


@pytest.mark.full
def test_what_a_dead_engine_held_is_given_up_at_once_and_carried_on_by_the_next(tmp_path):
    async def scenario() -> None:
        async with serving(tmp_path, NUM_STEPS, lease_s=LONG_LEASE_S) as swarm:
            async with alive(swarm, swarm.server.url) as (lives, engines):
                training = asyncio.create_task(swarm.train(NUM_STEPS))
                living = asyncio.create_task(lives.run())
                for number in (1, 2):
                    await until(lambda number=number: len(engines.opened) == number and leased(swarm))
                    engines.opened[-1].is_doomed = True
                    await until(lambda number=number: len(engines.buried) == number)
                await asyncio.gather(training, living)
            assert engines.buried == ["engine w failed: RuntimeError: the device is on fire"] * 2
            assert len(engines.said) == 2
            assert all(said.startswith("back; loading version ") for said in engines.said)
            assert swarm.ask("SELECT 1 FROM tasks WHERE num_losses > 0"), "nothing was lost with the engine"
            count = "SELECT COUNT(*), COUNT(DISTINCT task) FROM batch_members"
            assert swarm.ask(count) == [(NUM_TASKS, NUM_TASKS)]

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


@pytest.mark.full
def test_an_engine_whose_process_is_gone_is_dead_before_it_says_so_itself(tmp_path):
    async def scenario() -> None:
        async with serving(tmp_path, NUM_STEPS, lease_s=LONG_LEASE_S) as swarm:
            async with alive(swarm, swarm.server.url) as (lives, engines):
                training = asyncio.create_task(swarm.train(NUM_STEPS))
                living = asyncio.create_task(lives.run())
                await until(lambda: leased(swarm))
                engines.is_gone.set()
                await asyncio.gather(training, living)
            assert engines.buried == ["its process was killed"]

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


def test_what_was_finished_before_the_engine_died_is_handed_in_under_its_old_lease(tmp_path):
    async def scenario() -> None:
        async with (
            serving(tmp_path, NUM_STEPS, lease_s=LONG_LEASE_S) as swarm,
            FaultProxy(swarm.server.port) as proxy,
            alive(swarm, proxy.url) as (lives, engines),
        ):
            training = asyncio.create_task(swarm.train(NUM_STEPS))
            living = asyncio.create_task(lives.run())
            await until(lambda: engines.opened and engines.opened[-1].num_running >= 2)
            proxy.cut()
            spool = lives.spool
            await until(lambda: len(spool.left()) >= 2)
            finished = {unsent.key for unsent in spool.left()}
            engines.may_open.clear()
            engines.is_gone.set()
            await until(lambda: lives.num_deaths)
            proxy.heal()
            await until(lambda: finished <= set(swarm.ask("SELECT task, fence FROM trajectories")))
            await until(lambda: not spool.left())
            engines.may_open.set()  # the next engine, which may take minutes to come, was not waited for
            await asyncio.gather(training, living)

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


@asynccontextmanager
async def at_work(folder: Path):
    """A worker that holds leases, through its engines' lives; who trains meanwhile is given up in the end."""
    async with (
        serving(folder, NUM_STEPS, lease_s=LONG_LEASE_S) as swarm,
        alive(swarm, swarm.server.url) as (lives, engines),
    ):
        training = asyncio.create_task(swarm.train(NUM_STEPS))
        living = asyncio.create_task(lives.run())
        await until(lambda: leased(swarm))
        yield swarm, lives, engines, living
        training.cancel()


def test_a_worker_asked_to_stop_while_its_engine_is_away_leaves_nothing_leased(tmp_path):
    async def scenario() -> None:
        async with at_work(tmp_path) as (swarm, lives, engines, living):
            engines.may_open.clear()
            engines.opened[-1].is_doomed = True
            await until(lambda: engines.buried)
            assert leased(swarm) == []
            lives.stopping.request("a test")
            await living
            assert leased(swarm) == []
            assert "w" not in swarm.coordinator.present(LONG_LEASE_S)

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


def test_an_engine_that_dies_while_the_worker_leaves_does_not_keep_it(tmp_path):
    async def scenario() -> None:
        async with at_work(tmp_path) as (swarm, lives, engines, living):
            engines.opened[-1].is_doomed = True
            lives.stopping.request("a test")
            await living
            assert leased(swarm) == []
            assert len(engines.opened) == 1

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


def test_an_engine_without_a_next_one_ends_the_worker(tmp_path):
    async def scenario() -> None:
        async with at_work(tmp_path) as (_, _, engines, living):
            engines.has_next = False
            engines.opened[-1].is_doomed = True
            with pytest.raises(EngineDied, match="on fire"):
                await living
            assert len(engines.opened) == 1

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))
