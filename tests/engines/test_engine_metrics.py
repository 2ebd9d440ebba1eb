"""Counts of an engine's work: exact for the paced engine, and for servers as far as their answers report them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from paced_engines import ask, num_tokens, open_engine, timed
from paced_engines import version as paced_version
from served_scenes import begin, play, request, version

from benchmarks.common.clock import in_modelled_time, now_s
from offbeat.engines.dialect import Chunk
from offbeat.engines.protocol import EngineMetrics, Generation, KvMode, Request

# The paced engine


def test_a_paced_engine_counts_steps_rows_context_and_prefill_in_closed_form():
    async def scenario() -> EngineMetrics:
        engine = open_engine(prefill_s=0.25)
        await asyncio.gather(engine.generate(ask(8, max_new_tokens=3)), engine.generate(ask(5, max_new_tokens=7)))
        return engine.metrics

    assert in_modelled_time(scenario()) == EngineMetrics(
        num_steps=7,
        num_rows=3 * 2 + 4,
        num_context_tokens=(8 + 9 + 10) + sum(range(5, 12)),
        num_prefilled_tokens=13,
        num_resumed_tokens=0,
    )


def rest_of(asked: Request, generation: Generation) -> Request:
    whole = np.concatenate([asked.tokens, *(segment.tokens for segment in generation.segments)])
    return replace(ask(), tokens=whole, position=num_tokens(generation), kv=asked.kv)


def cut_and_carried_on(
    *, kv: KvMode = KvMode.SAME, load: int | None = None, others: int = 0
) -> tuple[float, EngineMetrics]:
    """How long ten tokens take after a cut at two, and all metrics by then."""

    async def scenario() -> tuple[float, EngineMetrics]:
        engine = open_engine(prefill_s=0.25, num_slots=4)
        asked = replace(ask(8, max_new_tokens=50), kv=kv)
        running = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(8 * 0.25 + 1.5 + 0.1)
        await engine.abort()
        rest = rest_of(asked, await running)
        assert rest.position == 2
        if load is not None:
            await engine.load(paced_version(load))
        await asyncio.gather(*(engine.generate(ask(1, max_new_tokens=1)) for _ in range(others)))
        start_s = now_s()
        end_s, _ = await timed(engine, rest)
        return end_s - start_s, engine.metrics

    return in_modelled_time(scenario())


def test_a_paced_request_that_was_cut_is_not_fed_again():
    seconds, metrics = cut_and_carried_on()
    assert seconds == pytest.approx(10 * 1.5)
    assert (metrics.num_prefilled_tokens, metrics.num_resumed_tokens) == (8, 9)


@pytest.mark.parametrize("how", [{"kv": KvMode.REFILL}, {"load": 2}, {"load": 1}, {"others": 4}], ids=str)
def test_a_paced_request_is_fed_again_after_a_load_or_where_its_slot_was_needed_or_it_wants_to(how):
    seconds, metrics = cut_and_carried_on(**how)
    assert seconds == pytest.approx(10 * 0.25 + 10 * 1.5)
    assert (metrics.num_prefilled_tokens, metrics.num_resumed_tokens) == (8 + 10 + how.get("others", 0), 0)


# Servers


def test_a_served_engine_counts_what_answers_tell_and_says_none_of_the_rest():
    async def scenario(engine, server):
        assert engine.metrics == EngineMetrics(num_steps=None, num_context_tokens=None)
        first, second = await begin(engine, server, "a", "b")
        await server.sample("a", 3)
        await server.sample("b", 1)
        await server.sample("a", 2)
        server.end("a")
        server.end("b")
        await asyncio.gather(first, second)
        assert engine.metrics == EngineMetrics(
            num_steps=None,
            num_rows=6,
            num_context_tokens=None,
            num_prefilled_tokens=None,
            num_resumed_tokens=None,
        )

    play(scenario)


def test_a_server_that_tells_what_it_had_lets_prefill_be_counted_and_a_load_adds_what_it_computes_again():
    async def scenario(engine, server):
        running, kept = await begin(engine, server, "a", request("b", KvMode.STALE, kv_lag=1))
        for name, num_cached in (("a", 2), ("b", 5)):
            server.inside[name].labels += [server.name]
            await server.say(name, Chunk([5], [-1.0], num_cached=num_cached))
        server.inside["a"].labels += [server.name]
        await server.say("a", Chunk([6], [-1.0], num_cached=2))
        assert (engine.metrics.num_prefilled_tokens, engine.metrics.num_resumed_tokens) == (3, 7), "once for each call"
        server.end("b")
        await kept
        await engine.load(version(2))
        assert engine.metrics.num_prefilled_tokens == 3 + 5 + 2
        server.end("a")
        await running

    play(scenario)


def test_a_load_that_keeps_keys_and_values_adds_no_prefill():
    async def scenario(engine, server):
        (kept,) = await begin(engine, server, request("b", KvMode.STALE, kv_lag=1))
        server.inside["b"].labels += [server.name]
        await server.say("b", Chunk([5], [-1.0], num_cached=2))
        await engine.load(version(2))
        assert engine.metrics.num_prefilled_tokens == 3
        server.end("b")
        await kept

    play(scenario)
