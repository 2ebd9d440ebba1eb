"""What every engine promises about keys and values: whose a token attends to, and that it is told.

Where an engine counts prefix tokens that it did not compute, the count is checked; log-probs are checked everywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from served_engine import Served
from test_engine_contract import (
    DELAYS_S,
    LONG,
    again,
    ask,
    assert_logprobs_are_the_models,
    prompt,
    tokens_of,
    with_engine,
)

from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.protocol import Engine, Finish, Generation, KvMode, Request
from offbeat.engines.server_engine import ServerEngine

pytestmark = pytest.mark.timeout(900)  # the first test of a server starts it, which takes minutes on busy cores
NUM_MORE = 24


async def cut_halfway(engine: Engine, request: Request) -> np.ndarray:
    """Begins a request and aborts it; returns its first tokens."""
    for delay_s in DELAYS_S:
        task = asyncio.create_task(engine.generate(again(request)))
        await asyncio.sleep(delay_s)
        await engine.abort()
        generation = await task
        if generation.finish is Finish.ABORT and generation.segments:
            return tokens_of(generation)
    raise AssertionError("no abort came halfway")


def rest_of(request: Request, done: np.ndarray) -> Request:
    """A few tokens more of a request that has some."""
    whole = np.concatenate([request.tokens, done])
    rest = ask(whole, seed=request.seed, position=len(done), max_new_tokens=NUM_MORE)
    return replace(rest, kv=request.kv, kv_lag=request.kv_lag)


class Resumed:
    """What came of a request that was cut, then of its rest, and how many tokens of that needed no prefill."""

    def __init__(self, rest: Request, generation: Generation, num_resumed: int | None):
        self.rest, self.generation, self.num_resumed = rest, generation, num_resumed

    @property
    def done(self) -> np.ndarray:
        return self.rest.tokens[len(self.rest.tokens) - self.rest.position :]


def cut_and_carried_on(
    served: Served, request: Request, between: Callable[[Engine], Awaitable[None]] | None = None
) -> Resumed:
    async def scenario(engine: Engine) -> Resumed:
        if request.kv not in engine.capabilities.kv_modes:
            pytest.skip(f"this engine cannot do {request.kv.value}")
        rest = rest_of(request, await cut_halfway(engine, request))
        if between is not None:
            await between(engine)
        before = engine.metrics.num_resumed_tokens
        generation = await engine.generate(rest)
        after = engine.metrics.num_resumed_tokens
        return Resumed(rest, generation, None if before is None or after is None else after - before)

    return with_engine(served, scenario)


def is_cold(served: Served, request: Request, generation: Generation, version: int) -> None:
    """A generation is what an engine says that has never seen anything else."""

    async def scenario(engine: Engine) -> tuple[Engine, Generation]:
        await engine.load(served.versions[version])
        return engine, await engine.generate(again(request))

    engine, expected = with_engine(served, scenario)
    if isinstance(engine, ServerEngine):  # what it samples depends on what else it computes
        return
    assert tokens_of(generation).tolist() == tokens_of(expected).tolist()
    tolerance = 0.0 if engine.capabilities.exact else served.logprob_tolerance
    for mine, its in zip(generation.segments, expected.segments, strict=True):
        np.testing.assert_allclose(mine.logprobs, its.logprobs, rtol=0, atol=tolerance)


def test_a_request_cut_and_carried_on_is_one_that_was_not_cut(served):
    request = ask(prompt(30, 40), seed=8, max_new_tokens=LONG)
    resumed = cut_and_carried_on(served, request)
    assert_logprobs_are_the_models(served, resumed.rest, resumed.generation)
    assert [(s.version, s.kv_version) for s in resumed.generation.segments] == [(0, 0)]

    async def scenario(engine: Engine) -> tuple[Engine, Generation]:
        num_tokens = len(resumed.done) + NUM_MORE
        return engine, await engine.generate(ask(request.tokens, seed=8, max_new_tokens=num_tokens))

    engine, uncut = with_engine(served, scenario)
    if isinstance(engine, ServerEngine):  # takes another seed for a continuation, and tells less
        return
    assert resumed.num_resumed == len(resumed.rest.tokens) - 1
    (whole,), (more,) = uncut.segments, resumed.generation.segments
    assert whole.tokens.tolist() == [*resumed.done.tolist(), *more.tokens.tolist()]
    tolerance = 0.0 if engine.capabilities.exact else served.logprob_tolerance
    np.testing.assert_allclose(more.logprobs, whole.logprobs[len(resumed.done) :], rtol=0, atol=tolerance)


def test_a_request_cut_before_a_load_is_computed_anew_after_it(served):
    async def load(engine: Engine) -> None:
        await engine.load(served.versions[1])

    resumed = cut_and_carried_on(served, ask(prompt(31, 40), seed=8, max_new_tokens=LONG), load)
    assert not resumed.num_resumed
    assert [(s.version, s.kv_version) for s in resumed.generation.segments] == [(1, 1)]
    assert_logprobs_are_the_models(served, resumed.rest, resumed.generation)
    is_cold(served, resumed.rest, resumed.generation, version=1)


def test_a_request_that_refills_never_resumes(served):
    request = replace(ask(prompt(32, 40), seed=8, max_new_tokens=LONG), kv=KvMode.REFILL)
    resumed = cut_and_carried_on(served, request)
    assert not resumed.num_resumed
    assert_logprobs_are_the_models(served, resumed.rest, resumed.generation)
    is_cold(served, resumed.rest, resumed.generation, version=0)


def test_a_prompt_that_is_sent_again_after_a_load_finds_nothing(served):
    request = ask(prompt(33, 40), seed=8)

    async def scenario(engine: Engine) -> tuple[Generation, int | None, int | None]:
        await engine.generate(again(request))
        held = asyncio.create_task(engine.generate(ask(request.tokens, max_new_tokens=LONG)))
        await asyncio.sleep(DELAYS_S[0])
        await engine.load(served.versions[1])
        await engine.abort()
        await held
        before = engine.metrics.num_resumed_tokens
        return await engine.generate(request), before, engine.metrics.num_resumed_tokens

    generation, before, after = with_engine(served, scenario)
    assert before == after
    assert_logprobs_are_the_models(served, request, generation)
    is_cold(served, request, generation, version=1)


@pytest.mark.parametrize("num_loads", [1, 2])
def test_stale_keys_and_values_of_a_cut_request_are_told_and_given_up_when_they_lag_too_far(served, num_loads):
    kept = []

    async def load(engine: Engine) -> None:
        kept.append(isinstance(engine, EmbeddedEngine) and num_loads == 1)  # servers forget all of it at a load
        for version in (served.versions[1], served.flat)[:num_loads]:
            await engine.load(version)

    request = replace(ask(prompt(34, 40), seed=8, max_new_tokens=LONG), kv=KvMode.STALE, kv_lag=1)
    resumed = cut_and_carried_on(served, request, load)
    (segment,) = resumed.generation.segments
    assert (segment.version, segment.kv_version) == (num_loads, 0 if kept == [True] else num_loads)
    if num_loads == 1:  # what old keys and values bring is not what the new version alone would say
        alone = served.logprobs(1, resumed.rest, segment.tokens)
        assert (np.abs(segment.logprobs - alone).max() > 10 * served.logprob_tolerance) == (kept == [True])


def test_figures_only_grow(served):
    request = ask(prompt(36, 40), seed=8)

    async def scenario(engine: Engine) -> None:
        before = engine.metrics
        for _ in range(3):
            await engine.generate(again(request))
            after = engine.metrics
            known = [(a, b) for a, b in zip(vars(before).values(), vars(after).values(), strict=True) if b is not None]
            assert all(a <= b for a, b in known)
            assert after.num_rows - before.num_rows >= NUM_MORE
            if after.num_steps is not None:  # alone inside, it has a step to itself for each token
                assert after.num_steps - before.num_steps == pytest.approx(NUM_MORE, abs=2)
            before = after

    with_engine(served, scenario)
