"""Scenes of a worker with a coordinator in memory and a paced engine, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from fake_coordinator import Desk

from benchmarks.common.clock import in_modelled_time, now_s
from offbeat.testing.paced import FixedLength, PacedEngine, PacedSettings, noise
from offbeat.trajectory import Trajectory
from offbeat.worker.worker import Worker

VOCAB = 1000


def open_engine(**settings) -> PacedEngine:
    """A token a second, whatever else runs."""
    settings = {"base_s": 1.0, "per_row_s": 0.0, "num_slots": 4, "vocab_size": VOCAB, **settings}
    return PacedEngine(PacedSettings(lengths=FixedLength(10**6), **settings), worker="w", clock=now_s)


def open_narrow_engine(**settings) -> PacedEngine:
    """An engine that promises more slots than it has, so that requests wait in it without a token."""
    engine = open_engine(num_slots=1, **settings)
    engine.capabilities = replace(engine.capabilities, num_slots=4)
    return engine


@asynccontextmanager
async def at_work(worker: Worker, *, dies: bool = False):
    """The worker runs beside what stands inside, and is cancelled afterwards."""
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(10_000):
            yield running
    finally:
        running.cancel()
        await asyncio.wait({running})
        if not dies and not running.cancelled():
            running.result()


def scene(script: Callable[[Desk], Awaitable[None]]) -> Desk:
    """Plays a script with an empty coordinator."""

    async def scenario() -> Desk:
        desk = Desk()
        await script(desk)
        return desk

    return in_modelled_time(scenario())


def assert_is_true(trajectory: Trajectory) -> None:
    """Tokens and log-probs are what the engine samples at these positions, however the response was cut."""
    for segment in trajectory.segments:
        seed, count = trajectory.task, len(segment.tokens)
        assert segment.tokens.tolist() == noise.tokens(seed, segment.start, count, VOCAB, ()).tolist()
        assert segment.logprobs.tolist() == noise.logprobs(seed, segment.start, count, segment.version).tolist()
