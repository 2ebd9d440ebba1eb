"""What engines tell of their work: the paced one in closed form, servers as far as their answers go; and timings."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest
from paced_engines import ask, num_tokens, open_engine, timed
from paced_engines import version as paced_version
from served_scenes import begin, play, request, version

from benchmarks.common.clock import in_modelled_time, now_s
from offbeat.engines.dialect import Call, Chunk
from offbeat.engines.protocol import EngineMetrics, Generation, KvMode, Request
from offbeat.engines.server_engine import Meter
from offbeat.rules.step_time import Timing
from offbeat.testing.paced import PacedEngine
from offbeat.trajectory import Sampling
from offbeat.worker.worker import Timings, timing_between

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
        busy_seconds=pytest.approx(13 * 0.25 + 3 * 2.0 + 4 * 1.5),
    )


def test_time_between_requests_and_for_loads_is_not_busy():
    async def scenario() -> float | None:
        engine = open_engine(load_s=10.0)
        await engine.generate(ask(max_new_tokens=2))
        await asyncio.sleep(100.0)
        await engine.load(paced_version(2))
        await engine.generate(ask(max_new_tokens=2))
        return engine.metrics.busy_seconds

    assert in_modelled_time(scenario()) == pytest.approx(4 * 1.5)


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
        assert engine.metrics == EngineMetrics()
        first, second = await begin(engine, server, "a", "b")
        await server.sample("a", 3)
        await server.sample("b", 1)
        await server.sample("a", 2)
        await asyncio.sleep(4.0)
        server.end("a")
        server.end("b")
        await asyncio.gather(first, second)
        await asyncio.sleep(100.0)
        assert engine.metrics == EngineMetrics(
            num_steps=3,
            num_rows=6,
            num_context_tokens=(5 + 6 + 7 + 8 + 9) + 5,
            num_prefilled_tokens=None,
            num_resumed_tokens=None,
            busy_seconds=pytest.approx(4.0),
        )

    play(scenario)


@pytest.mark.parametrize("num_in_event", [1, 8])
def test_a_servers_steps_are_the_tokens_of_a_call_however_many_decode_and_however_tokens_are_bundled(num_in_event):
    """A call that decodes for ten seconds, others that join and leave, a load."""
    clock = [0.0]
    meter = Meter(lambda: clock[0])
    lives = {"long": (0, 96), "early": (0, 32), "late": (40, 96), "later": (48, 64)}
    calls = {name: Call(name, [1] * 5, 0, Sampling(max_new_tokens=99), "salt", "label") for name in lives}
    with ExitStack() as stack:
        inside = {name: stack.enter_context(ExitStack()) for name in calls}
        seen = []
        for step in range(97):
            for name, (first, last) in lives.items():
                if step == first:
                    inside[name].enter_context(meter.inside(calls[name]))
                    meter.take(calls[name], Chunk([7], [-1.0]))
                elif first < step <= last and (step - first) % num_in_event == 0:
                    meter.take(calls[name], Chunk([7] * num_in_event, [-1.0] * num_in_event))
                if step == last:
                    inside[name].close()
            if step % 16 == 0:
                seen.append(meter.metrics.num_steps)
            if step == 50:
                meter.stand_still(True)
                clock[0] += 1000.0
                meter.stand_still(False)
            clock[0] += 0.1
    assert meter.metrics.busy_seconds == pytest.approx(9.6)
    assert meter.metrics.num_rows == 4 + 96 + 32 + 56 + 16
    assert seen == [pytest.approx(step, abs=3) for step in range(0, 97, 16)]


def test_a_server_that_tells_what_it_had_lets_prefill_be_counted_and_a_load_adds_what_it_computes_again():
    async def scenario(engine, server):
        running, kept = await begin(engine, server, "a", request("b", KvMode.STALE, kv_lag=1))
        for name, num_cached in (("a", 2), ("b", 5)):
            server.inside[name].labels += [server.name]
            await server.say(name, Chunk([5], [-1.0], num_cached=num_cached))
        assert (engine.metrics.num_prefilled_tokens, engine.metrics.num_resumed_tokens) == (3, 7)
        server.end("b")
        await kept
        await engine.load(version(2))
        assert engine.metrics.num_prefilled_tokens == 3 + 5 + 1
        server.end("a")
        await running

    play(scenario)


# Timings


@dataclass
class Told:
    metrics: EngineMetrics


def test_timings_are_what_was_done_between_two_looks():
    engine = Told(EngineMetrics(5, 50, 500, 40, 30, 2.0))
    timings = Timings(engine)
    assert timings.take() is None
    engine.metrics += EngineMetrics(2, 6, 90, 7, 100, 0.5)
    assert timings.take() == Timing(2, 6, 90, 7, 0.5)
    assert timings.take() is None


def test_what_is_done_without_a_step_is_told_with_the_next_one():
    engine = Told(EngineMetrics())
    timings = Timings(engine)
    engine.metrics += EngineMetrics(num_prefilled_tokens=9, busy_seconds=1.0)
    assert timings.take() is None
    engine.metrics += EngineMetrics(1, 1, 9, 0, 0, 1.0)
    assert timings.take() == Timing(1, 1, 9, 9, 2.0)


@pytest.mark.parametrize("unknown", ["num_steps", "num_rows", "num_context_tokens", "busy_seconds"])
def test_an_engine_that_does_not_know_has_no_timings(unknown):
    before, after = EngineMetrics(), EngineMetrics(1, 1, 1, 1, 1, 1.0)
    assert timing_between(before, after) is not None
    assert timing_between(replace(before, **{unknown: None}), replace(after, **{unknown: None})) is None


def test_a_prefill_that_an_engine_does_not_tell_counts_as_none():
    before, after = (EngineMetrics(n, n, n, None, None, float(n)) for n in (1, 3))
    assert timing_between(before, after) == Timing(2, 2, 2, 0, 2.0)


def test_timings_of_a_paced_engine_add_up_to_its_time():
    async def scenario() -> list[Timing]:
        engine: PacedEngine = open_engine(prefill_s=0.25)
        timings = Timings(engine)
        taken = []
        for length in (3, 7):
            await engine.generate(ask(8, max_new_tokens=length))
            taken.append(timings.take())
        return taken

    first, second = in_modelled_time(scenario())
    assert first == Timing(3, 3, 8 + 9 + 10, 8, pytest.approx(8 * 0.25 + 3 * 1.5))
    assert second == Timing(7, 7, sum(range(8, 15)), 8, pytest.approx(8 * 0.25 + 7 * 1.5))
