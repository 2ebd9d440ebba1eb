"""Scenes of an engine around a scripted server, in modelled time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from scripted_server import ScriptedServer

from benchmarks.common.clock import in_modelled_time, now_s
from offbeat.engines import server_engine as served
from offbeat.engines.http_calls import ServerAway
from offbeat.engines.protocol import Generation, KvMode, Request
from offbeat.engines.server_engine import ServerEngine
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version

Scenario = Callable[[ServerEngine, ScriptedServer], Awaitable[None]]
PROMPT = np.arange(5)
AWAY = ServerAway("the line is down")


def play(scenario: Scenario, *, loads: int | None = 1, **facts: bool) -> None:
    """Plays with an engine that has loaded a version, and closes it."""

    async def run() -> None:
        server = ScriptedServer(**facts)
        engine = await ServerEngine.attach(server, worker="w", num_slots=8)
        try:
            if loads is not None:
                await engine.load(version(loads))
                server.told.clear()
            async with asyncio.timeout(10_000):
                await scenario(engine, server)
        finally:
            await engine.close()

    with patch.object(served, "time", SimpleNamespace(monotonic=now_s)):
        in_modelled_time(run())


def version(number: int) -> Version:
    return Version(number, step=number, parent=None, digest="d", path=Path("nowhere"))


def request(id: str, kv: KvMode = KvMode.SAME, kv_lag: int = 0) -> Request:
    return Request(id, PROMPT, seed=3, sampling=Sampling(max_new_tokens=100), kv=kv, kv_lag=kv_lag)


async def begin(engine: ServerEngine, server: ScriptedServer, *wanted: str | Request) -> list[asyncio.Task[Generation]]:
    """Requests, or those of such names, once all of them are inside the server."""
    requests = [request(each) if isinstance(each, str) else each for each in wanted]
    answers = [asyncio.create_task(engine.generate(each)) for each in requests]
    await server.until_inside(*(each.id for each in requests))
    return answers


def assert_is_true(generation: Generation) -> None:
    """Every token stands where it was sampled, and is of the version that it was sampled from."""
    at = 0
    for segment in generation.segments:
        assert segment.start == at
        at = segment.end
        assert segment.logprobs is not None
        assert set(segment.logprobs.tolist()) == {-float(segment.version)}
    tokens = [token for segment in generation.segments for token in segment.tokens.tolist()]
    assert tokens == list(range(len(PROMPT), len(PROMPT) + at))
