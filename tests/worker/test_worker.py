"""The worker's loop against a coordinator in memory and a paced engine, in virtual time.

Loads are in `test_worker_versions.py`, its end and its spool in `test_worker_leaving.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
import pytest
from fake_coordinator import TTL_S, Desk, a_task
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_scenes import assert_is_true, at_work, open_engine, scene

from benchmarks.common.clock import now_s
from offbeat.engines.protocol import EngineDied, Generation, Request
from offbeat.testing.paced import PacedEngine, PacedSettings
from offbeat.trajectory import End, Segment, Trajectory
from offbeat.worker.worker import Worker


def test_tasks_are_leased_by_free_slots_carried_on_and_handed_in(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[0])
        desk.add(*(a_task(n, max_new_tokens=5 + n) for n in range(10)))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: len(desk.done) == 10)

    desk = scene(script)
    assert max(desk.names("lease")) == 4
    assert {n: (t.num_tokens, t.end) for n, t in desk.done.items()} == {n: (5 + n, End.LENGTH) for n in range(10)}
    assert set(desk.names("fetch")) == {0}
    for trajectory in desk.done.values():
        assert_is_true(trajectory)


def test_leases_are_renewed_every_third_of_their_time_until_they_are_answered(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.submit_s = 50.0
        desk.add(a_task(1, 40))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 1 in desk.done)
            await asyncio.sleep(100)

    desk = scene(script)
    first, *beats = desk.names("heartbeat")
    assert first == ()  # a new life, which knows of nothing
    assert set(beats) == {((1, 1),)}
    times_s = desk.times_s("heartbeat")[1:]
    assert np.diff(times_s) == pytest.approx(TTL_S / 3)
    assert len(times_s) in (8, 9)


def test_what_is_lost_is_aborted_and_never_sent_and_nothing_else(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100), a_task(2, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(5)
            del desk.held[1]
            await desk.until(lambda: 2 in desk.done)

    desk = scene(script)
    assert desk.names("submit") == [(2, 1)]


def test_a_lost_task_that_comes_back_is_carried_on_under_its_new_fence_alone(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(5)
            desk.lose(1)
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert desk.names("submit") == [(1, 2)]
    assert desk.done[1].num_tokens == 100


def test_a_prefix_that_used_up_its_budget_is_finished_without_generating(versions):
    prefix = Trajectory(1, np.arange(1, 6), max_new_tokens=4)
    prefix.append(Segment(0, np.arange(4), logprobs=np.zeros(4), version=1, kv_version=1))

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 4, prefix=prefix))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 1 in desk.done)

    desk = scene(script)
    assert (desk.done[1].end, desk.done[1].tokens.tolist()) == (End.LENGTH, [0, 1, 2, 3])
    assert prefix.is_partial, "the coordinator's own object was changed"


def test_a_task_that_does_not_fit_fails_with_the_reason_and_the_worker_goes_on(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 100_000), a_task(2, 20))
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 2 in desk.done and desk.failures)

    desk = scene(script)
    assert "add up to 100005, but the engine's context holds 8192 tokens" in desk.failures[1]


def test_an_engine_that_dies_ends_the_worker_with_that_error(versions):
    class Dying(PacedEngine):
        async def generate(self, request: Request) -> Generation:
            await super().generate(request)
            raise EngineDied("engine w failed: the device is on fire")

    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1), a_task(2))
        engine = Dying(PacedSettings(), clock=now_s)
        with pytest.raises(EngineDied, match="on fire"):
            await Worker("w", engine, desk).run()

    desk = scene(script)
    assert desk.failures == {}


def test_what_is_refused_is_told_discarded_and_not_tried_again(versions, caplog):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1), a_task(2), a_task(3))
        desk.refuse = {1, 2}
        async with at_work(Worker("w", open_engine(), desk)):
            await desk.until(lambda: 3 in desk.done)
            await asyncio.sleep(100)

    with caplog.at_level(logging.WARNING):
        desk = scene(script)
    assert sorted(desk.names("submit")) == [(1, 1), (2, 1), (3, 1)]
    assert desk.failures == {1: "task 1: refused", 2: "task 2: refused"}
    assert "task 2: refused" in caplog.text


moments = st.floats(0, 150)


@settings(max_examples=60)
@given(
    tasks=st.lists(st.tuples(moments, st.integers(1, 60), st.sampled_from([None, None, 0, 1, 2])), max_size=14),
    publishes=st.lists(moments, max_size=4),
    losses=st.lists(st.tuples(moments, st.integers(0, 13)), max_size=4),
    delays=st.tuples(st.floats(0, 20), st.floats(0, 5), st.floats(0, 10)),
    splits=st.booleans(),
    drain_at_s=st.none() | moments,
)
def test_whatever_happens_every_task_ends_once_from_versions_that_it_allows(
    versions, tasks, publishes, losses, delays, splits, drain_at_s
):
    """Loads, losses and a worker that leaves at random moments; another one takes its place."""

    async def script(desk: Desk) -> None:
        desk.fetch_s, desk.submit_s, load_s = delays
        desk.publish(versions[0])
        workers = [Worker(name, open_engine(splits_by_version=splits, load_s=load_s), desk) for name in "ab"]

        async def at(moment_s: float, what: Callable[[], object]) -> None:
            await asyncio.sleep(moment_s)
            what()

        async def change_workers() -> None:
            if drain_at_s is not None:
                await asyncio.sleep(drain_at_s)
                await workers[0].drain()
                await workers[1].run()

        def lose(number: int) -> None:
            if number in desk.held:
                desk.lose(number)

        async with asyncio.TaskGroup() as happening:
            for number, at_s in enumerate(sorted(publishes), start=1):
                happening.create_task(at(at_s, lambda number=number: desk.publish(versions[number])))
            for at_s, number in losses:
                happening.create_task(at(at_s, lambda number=number: lose(number)))
            usable = [(at_s, n, length, v) for n, (at_s, length, v) in enumerate(tasks) if (v or 0) <= len(publishes)]
            for at_s, number, length, required in usable:
                task = a_task(number, length, require_version=required)
                ready_s = max(at_s, sorted(publishes)[required - 1] if required else 0.0)
                happening.create_task(at(ready_s, lambda task=task: desk.add(task)))
            first = happening.create_task(workers[0].run())
            second = happening.create_task(change_workers())
            async with asyncio.timeout(20_000):
                await desk.until(lambda: len(desk.done) == len(usable))
            first.cancel()
            second.cancel()
        assert desk.failures == {}
        for number, (_, length, required) in enumerate(tasks):
            if (required or 0) <= len(publishes):
                trajectory = desk.done[number]
                assert trajectory.num_tokens == length
                assert_is_true(trajectory)
                sampled = [s.version for s in trajectory.segments]
                assert sampled == sorted(sampled)
                assert required is None or set(sampled) == {required}

    scene(script)
