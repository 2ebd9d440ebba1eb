"""The paced engine: its times in closed form, and its promises at random moments."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paced_engines import ask, num_tokens, open_engine, timed, version

from benchmarks.common.clock import in_modelled_time, now_s
from offbeat.engines.protocol import EngineDied, EngineError, Finish
from offbeat.errors import UserError
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings, noise
from offbeat.trajectory import End, Sampling, Trajectory

STOP = 7


def test_a_lone_request_takes_its_steps():
    async def scenario():
        return await timed(open_engine(prefill_s=0.25), ask(8, max_new_tokens=10))

    end_s, generation = in_modelled_time(scenario())
    assert end_s == pytest.approx(8 * 0.25 + 10 * 1.5)
    assert (generation.finish, num_tokens(generation)) == (Finish.LENGTH, 10)


def test_speed_divides_steps_and_prefill():
    async def scenario():
        return await timed(open_engine(prefill_s=0.25, speed=4.0), ask(8, max_new_tokens=10))

    assert in_modelled_time(scenario())[0] == pytest.approx((8 * 0.25 + 10 * 1.5) / 4)


def test_rows_share_steps_and_leave_when_they_are_done():
    async def scenario():
        engine = open_engine()
        requests = [ask(max_new_tokens=length) for length in (2, 5, 9)]
        return await asyncio.gather(*(timed(engine, request) for request in requests))

    ends_s = [end_s for end_s, _ in in_modelled_time(scenario())]
    assert ends_s == pytest.approx([2 * 2.5, 2 * 2.5 + 3 * 2.0, 2 * 2.5 + 3 * 2.0 + 4 * 1.5])


def test_a_request_that_comes_during_a_step_begins_with_the_next():
    async def scenario():
        engine = open_engine(prefill_s=0.1)
        first, second = ask(10, max_new_tokens=4), ask(20, max_new_tokens=2)
        return await asyncio.gather(timed(engine, first), timed(engine, second, after_s=3.0))

    (first_s, _), (second_s, _) = in_modelled_time(scenario())
    begin_s = 1.0 + 2 * 1.5  # the step that is under way at 3 ends at 4
    assert second_s == pytest.approx(begin_s + 2.0 + 2 * 2.0)
    assert first_s == pytest.approx(second_s)


def test_waiting_requests_take_the_slots_that_get_free():
    async def scenario():
        engine = open_engine(num_slots=1)
        return await asyncio.gather(*(timed(engine, ask(max_new_tokens=2)) for _ in range(3)))

    assert [end_s for end_s, _ in in_modelled_time(scenario())] == pytest.approx([3.0, 6.0, 9.0])


def test_a_load_stops_all_steps_and_feeds_again_what_runs():
    async def scenario():
        engine = open_engine(prefill_s=0.1, load_s=10.0)
        running = asyncio.create_task(timed(engine, ask(10, max_new_tokens=6)))
        await asyncio.sleep(3.0)
        await engine.load(version(2))
        loaded_s = now_s()
        return loaded_s, await running

    loaded_s, (end_s, generation) = in_modelled_time(scenario())
    assert loaded_s == pytest.approx(1.0 + 2 * 1.5 + 10.0)
    assert end_s == pytest.approx(loaded_s + (10 + 2) * 0.1 + 4 * 1.5)
    assert [(s.version, s.kv_version, s.start, s.end) for s in generation.segments] == [(1, 1, 0, 2), (2, 2, 2, 6)]


def test_an_abort_is_done_at_the_end_of_the_step_and_keeps_its_token():
    async def scenario():
        engine = open_engine()
        running = asyncio.create_task(timed(engine, ask(max_new_tokens=100)))
        await asyncio.sleep(4.0)
        await engine.abort()
        return now_s(), await running

    aborted_s, (end_s, generation) = in_modelled_time(scenario())
    assert aborted_s == end_s == pytest.approx(4.5)
    assert (generation.finish, num_tokens(generation)) == (Finish.ABORT, 3)


def test_close_ends_all_at_once_with_the_tokens_of_whole_steps():
    async def scenario():
        engine = open_engine(num_slots=1)
        running = [asyncio.create_task(engine.generate(ask(max_new_tokens=100))) for _ in range(2)]
        await asyncio.sleep(4.0)
        await engine.close()
        assert now_s() == 4.0
        with pytest.raises(EngineDied, match="closed"):
            await engine.generate(ask())
        await engine.close()
        return await asyncio.gather(*running)

    first, waiting = in_modelled_time(scenario())
    assert (first.finish, num_tokens(first)) == (Finish.ABORT, 2)
    assert (waiting.finish, num_tokens(waiting)) == (Finish.ABORT, 0)


def test_a_cancelled_request_frees_its_slot():
    async def scenario():
        engine = open_engine(num_slots=1)
        running = asyncio.create_task(engine.generate(ask(max_new_tokens=100)))
        await asyncio.sleep(1.0)
        running.cancel()
        return await timed(engine, ask(max_new_tokens=2))

    assert in_modelled_time(scenario())[0] == pytest.approx(1.5 + 2 * 1.5)


def test_a_clock_that_breaks_fails_all_who_wait():
    async def broken(seconds: float) -> None:
        raise OSError("no timer")

    async def scenario():
        engine = PacedEngine(PacedSettings(), version=1, sleep=broken)
        with pytest.raises(EngineDied, match="OSError: no timer"):
            await engine.generate(ask())
        with pytest.raises(EngineDied, match="OSError: no timer"):
            await engine.abort()

    asyncio.run(scenario())


def test_a_coarse_clock_makes_nothing_late():
    async def scenario():
        engine = PacedEngine(PacedSettings(base_s=0.3, per_row_s=0.0), version=1, clock=lambda: float(int(now_s())))
        return await timed(engine, ask(max_new_tokens=11))

    assert in_modelled_time(scenario())[0] == pytest.approx(3.3)


def test_an_id_may_be_used_again_once_its_request_ended():
    async def scenario():
        engine = open_engine()
        first, other = ask(max_new_tokens=5), ask(max_new_tokens=3)
        running = [asyncio.create_task(engine.generate(request)) for request in (first, other)]
        await asyncio.sleep(1.0)
        await engine.abort([first.id])
        assert (await running[0]).finish is Finish.ABORT
        again = await engine.generate(replace(first, sampling=Sampling(max_new_tokens=12)))
        return num_tokens(again), num_tokens(await running[1])

    assert in_modelled_time(scenario()) == (12, 3)


def test_waking_costs_events_not_tokens():
    num_sleeps = 0

    async def sleep(seconds: float) -> None:
        nonlocal num_sleeps
        num_sleeps += 1
        await asyncio.sleep(seconds)

    async def scenario():
        engine = PacedEngine(PacedSettings(max_context_tokens=10**6), version=1, clock=now_s, sleep=sleep)
        return await engine.generate(ask(max_new_tokens=100_000))

    assert num_tokens(in_modelled_time(scenario())) == 100_000
    assert num_sleeps <= 2


def test_a_response_ends_by_its_stop_token_where_the_length_model_says_so():
    async def scenario():
        engine = open_engine(vocab_size=16)
        return [await engine.generate(ask(max_new_tokens=n, stop_token_ids=(STOP,))) for n in (5, 6, 50)]

    cut, exact, free = in_modelled_time(scenario())
    assert [(g.finish, num_tokens(g)) for g in (cut, exact, free)] == [
        (Finish.LENGTH, 5),
        (Finish.STOP, 6),
        (Finish.STOP, 6),
    ]
    assert free.segments[-1].tokens[-1] == STOP
    assert STOP not in free.segments[0].tokens[:-1]
    assert STOP not in cut.segments[0].tokens


def test_lengths_have_the_median_and_the_tail_that_were_asked_for():
    model = LogNormalLength(median_tokens=200, sigma=1.0, max_tokens=2000)
    lengths = np.array([model.num_tokens(seed) for seed in range(4000)])
    assert np.median(lengths) == pytest.approx(200, rel=0.1)
    assert np.percentile(lengths, 84.1) == pytest.approx(200 * np.e, rel=0.1)
    assert lengths.max() == 2000
    assert lengths.min() >= 1


def test_logprobs_and_tokens_do_not_depend_on_how_positions_are_cut():
    whole = noise.tokens(5, 0, 100, 50, [3])
    assert whole.tolist() == [*noise.tokens(5, 0, 33, 50, [3]).tolist(), *noise.tokens(5, 33, 67, 50, [3]).tolist()]
    logprobs = noise.logprobs(5, 0, 100, 1)
    assert logprobs[40:].tolist() == noise.logprobs(5, 40, 60, 1).tolist()
    assert (logprobs != noise.logprobs(5, 0, 100, 2)).mean() > 0.9
    assert np.isfinite(logprobs).all()
    assert logprobs.max() <= 0
    assert len(set(whole.tolist())) > 30


def test_an_engine_that_cannot_split_refuses_to_load_under_requests():
    async def scenario():
        engine = open_engine(splits_by_version=False)
        running = asyncio.create_task(engine.generate(ask()))
        await asyncio.sleep(1.0)
        with pytest.raises(EngineError, match="while requests run"):
            await engine.load(version(2))
        await running
        await engine.load(version(2))
        return engine.version

    assert in_modelled_time(scenario()) == 2


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"num_slots": 0}, "num_slots is 0; it must be at least 1"),
        ({"base_s": -1.0}, "base_s is -1.0"),
        ({"base_s": 0.0, "per_row_s": 0.0}, "a step must take time"),
        ({"speed": 0.0}, "speed is 0.0"),
        ({"load_s": float("nan")}, "load_s is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, why):
    with pytest.raises(UserError, match=why):
        PacedSettings(**settings)


moments = st.floats(0, 60, allow_nan=False)
requests = st.tuples(moments, st.integers(1, 12), st.integers(0, 40), st.integers(1, 50), st.booleans())


@given(
    st.lists(requests, min_size=1, max_size=12),
    st.lists(moments, max_size=5, unique=True),
    st.lists(st.tuples(moments, st.integers(0, 12)), max_size=6),
    st.integers(1, 4),
    st.floats(0, 3),
)
def test_at_random_moments_tokens_are_conserved_segments_tile_and_versions_are_true(
    asked, loads, aborts, slots, load_s
):
    """Whatever comes when: answers fit a trajectory, carry the noise of their positions, and name versions in force."""
    in_force: list[tuple[float, float, int]] = []

    async def scenario():
        engine = open_engine(num_slots=slots, load_s=load_s, lengths=LogNormalLength(10, 1.0, 60), vocab_size=64)
        all_requests = [
            ask(prompt, seed=seed, max_new_tokens=budget, stop_token_ids=(STOP,) if stops else ())
            for _, prompt, seed, budget, stops in asked
        ]

        async def load(at_s: float, number: int) -> None:
            await asyncio.sleep(at_s)
            asked_s = now_s()
            await engine.load(version(number))
            assert engine.version >= number
            in_force.append((asked_s, now_s(), number))

        async def abort(at_s: float, which: int) -> None:
            await asyncio.sleep(at_s)
            await engine.abort([all_requests[which].id] if which < len(all_requests) else None)

        async with asyncio.TaskGroup() as group:
            for number, at_s in enumerate(sorted(loads), start=2):
                group.create_task(load(at_s, number))
            for at_s, which in aborts:
                group.create_task(abort(at_s, which))
            answers = [
                group.create_task(timed(engine, request, after_s=asked[i][0])) for i, request in enumerate(all_requests)
            ]
        assert engine._paced.num_requests == 0
        assert engine._answers == {}
        return [(request, *answer.result()) for request, answer in zip(all_requests, answers, strict=True)]

    answers = in_modelled_time(scenario())
    loaded_s = {1: 0.0} | {number: at_s for _, at_s, number in in_force}
    for (begin_s, *_), (request, end_s, generation) in zip(asked, answers, strict=True):
        trajectory = Trajectory(0, request.tokens, request.sampling.max_new_tokens)
        for segment in generation.segments:
            trajectory.append(segment)
            expected = noise.logprobs(request.seed, segment.start, len(segment.tokens), segment.version)
            assert segment.logprobs.tolist() == expected.tolist()
            assert loaded_s[segment.version] < end_s
        if generation.segments:
            newest_before = max(number for number, at_s in loaded_s.items() if at_s <= begin_s)
            assert generation.segments[0].version >= newest_before
        if generation.finish is not Finish.ABORT:
            trajectory.finish(End(generation.finish.value))
            whole = LogNormalLength(10, 1.0, 60).num_tokens(request.seed)
            is_stop = bool(request.sampling.stop_token_ids) and whole <= request.sampling.max_new_tokens
            assert generation.finish is (Finish.STOP if is_stop else Finish.LENGTH)
            assert trajectory.num_tokens == (whole if is_stop else request.sampling.max_new_tokens)
        elif not aborts:
            raise AssertionError("nobody asked for an abort")
        least_s = trajectory.num_tokens * 1.5
        assert end_s - begin_s >= least_s - 1e-6
