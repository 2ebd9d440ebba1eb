"""The worker's loop where work comes in rounds, or answers end as they began: what is stopped, carried on and begun
when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fake_coordinator import Desk, a_task
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_scenes import assert_is_true, at_work, open_engine, open_narrow_engine, scene

from offbeat.client.protocol import LeaseResponse
from offbeat.worker.worker import Worker


@pytest.mark.parametrize("splits", [True, False])
def test_when_a_round_is_over_what_is_unfinished_is_handed_back_at_once_and_carried_on_in_the_next(versions, splits):
    async def script(desk: Desk) -> None:
        desk.begin_round(versions[1])
        desk.add(a_task(1, 10), a_task(2, 60), a_task(3, 60))
        async with at_work(Worker("w", open_engine(splits_by_version=splits), desk)):
            await desk.until(lambda: 1 in desk.done)
            desk.end_round()
            await desk.until(lambda: len(desk.partials) == 2)
            assert desk.times_s("submit")[-1] - desk.times_s("submit")[0] <= 1.0, "it waited for a heartbeat"
            await asyncio.sleep(100)
            assert desk.held == {}, "something was begun between two rounds"
            desk.begin_round(versions[2])
            await desk.until(lambda: len(desk.done) == 3)

    desk = scene(script)
    assert [partial.task for partial in desk.partials] == [2, 3]
    for number in (2, 3):
        assert [segment.version for segment in desk.done[number].segments] == [1, 2]
        assert desk.done[number].num_tokens == 60
        assert_is_true(desk.done[number])
    assert (desk.failures, desk.given_back) == ({}, [])


def test_what_has_no_token_when_a_round_is_over_is_given_back_and_nobody_is_blamed(versions):
    async def script(desk: Desk) -> None:
        desk.begin_round(versions[1])
        desk.add(a_task(1, 60), a_task(2, 60), a_task(3, 60))
        async with at_work(Worker("w", open_narrow_engine(), desk)):
            await asyncio.sleep(10)
            desk.end_round()
            await desk.until(lambda: len(desk.given_back) == 2)
            desk.begin_round(versions[2])
            await desk.until(lambda: len(desk.done) == 3)

    desk = scene(script)
    assert desk.names("give_back") == [((2, 1), (3, 1))], "one call names them all"
    assert [partial.task for partial in desk.partials] == [1]
    assert [segment.version for segment in desk.done[2].segments] == [2]
    assert desk.failures == {}


def test_evaluation_goes_on_when_a_round_is_over(versions):
    async def script(desk: Desk) -> None:
        desk.begin_round(versions[1])
        desk.add(a_task(1, 50, require_version=1), a_task(2, 50))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(10)
            desk.end_round()
            await desk.until(lambda: 1 in desk.done)
            desk.add(a_task(3, 50, require_version=1))
            await desk.until(lambda: 3 in desk.done)

    desk = scene(script)
    assert [partial.task for partial in desk.partials] == [2]
    assert [segment.version for segment in desk.done[1].segments] == [1]


def test_tasks_that_come_after_their_round_is_over_are_given_back(versions):
    class Slow(Desk):
        """The answer to a call for tasks is on its way for long."""

        async def lease(self, *asked) -> LeaseResponse:
            lease = await super().lease(*asked)
            if any(task.id == 2 for task in lease.tasks) and self.round == 1:
                await asyncio.sleep(30)
            return lease

    async def script(_: Desk) -> None:
        desk = Slow()
        desk.begin_round(versions[1])
        desk.add(a_task(1, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(10)
            desk.add(a_task(2, 20), a_task(3, 20, require_version=1))
            await asyncio.sleep(10)
            desk.end_round()
            await desk.until(lambda: desk.given_back == [2] and 3 in desk.done)
            assert [partial.task for partial in desk.partials] == [1]
            desk.begin_round(versions[2])
            await desk.until(lambda: len(desk.done) == 3)
        assert [segment.version for segment in desk.done[2].segments] == [2]
        assert desk.failures == {}

    scene(script)


def test_what_is_left_of_a_round_that_ended_unheard_is_handed_back_though_the_next_has_begun(versions):
    class Deaf(Desk):
        async def round_over(self, number: int, wait_s: float) -> bool:
            if number == 1:
                await asyncio.sleep(30)
            return await super().round_over(number, wait_s)

    async def script(_: Desk) -> None:
        desk = Deaf()
        desk.begin_round(versions[1])
        desk.add(a_task(1, 100), a_task(2, 100))
        async with at_work(Worker("w", open_engine(), desk)):
            await asyncio.sleep(10)
            desk.end_round()
            desk.begin_round(versions[2])
            desk.add(a_task(3, 100))
            await desk.until(lambda: len(desk.done) == 3)
        assert sorted(partial.task for partial in desk.partials) == [1, 2]
        assert [segment.version for segment in desk.done[1].segments] == [1, 2, 2]
        assert [segment.version for segment in desk.done[3].segments] == [2]

    scene(script)


def test_who_leaves_when_a_round_is_over_hands_back_all_the_same(versions):
    async def script(desk: Desk) -> None:
        desk.begin_round(versions[1])
        desk.add(a_task(1, 100), a_task(2, 100))
        worker = Worker("w", open_narrow_engine(), desk)
        async with at_work(worker):
            await asyncio.sleep(10)
            desk.end_round()
            await worker.drain()

    desk = scene(script)
    assert [partial.task for partial in desk.partials] == [1]
    assert desk.held == {}


def test_answers_end_as_they_began_and_nothing_is_begun_until_the_newest_weights_are_there(versions):
    async def script(desk: Desk) -> None:
        desk.publish(versions[1])
        desk.add(a_task(1, 20), a_task(2, 60))
        engine = open_engine()
        async with at_work(Worker("w", engine, desk, finishes=True)):
            await asyncio.sleep(10)
            desk.publish(versions[2])
            await asyncio.sleep(10)
            desk.publish(versions[3])
            desk.add(*(a_task(number, 20) for number in range(3, 8)))
            await desk.until(lambda: 2 in desk.done)
            await desk.until(lambda: len(desk.done) == 7)

    desk = scene(script)
    found = {number: [segment.version for segment in done.segments] for number, done in desk.done.items()}
    assert (found[1], found[2]) == ([1], [1])
    assert all(found[number] == [3] for number in range(3, 8)), "a version that was replaced was loaded"
    assert desk.partials == []


moments = st.floats(0, 150)


@settings(max_examples=60)
@given(
    tasks=st.lists(st.tuples(moments, st.integers(1, 60), st.booleans()), min_size=1, max_size=14),
    ends=st.lists(st.tuples(moments, st.floats(0, 20)), max_size=4),
    losses=st.lists(st.tuples(moments, st.integers(0, 13)), max_size=4),
    delays=st.tuples(st.floats(0, 20), st.floats(0, 5), st.floats(0, 10)),
    splits=st.booleans(),
    slots=st.sampled_from([1, 4]),
    drain_at_s=st.none() | moments,
)
def test_whatever_happens_in_rounds_every_task_ends_once(
    versions, tasks, ends, losses, delays, splits, slots, drain_at_s
):
    """Rounds end and begin at random moments, tasks are lost, a worker leaves and another takes its place."""

    async def script(desk: Desk) -> None:
        desk.fetch_s, desk.submit_s, load_s = delays
        desk.begin_round(versions[0])
        engines = [
            (open_engine if slots == 4 else open_narrow_engine)(splits_by_version=splits, load_s=load_s) for _ in "ab"
        ]
        workers = [Worker(name, engine, desk) for name, engine in zip("ab", engines, strict=True)]

        async def at(moment_s: float, what: Callable[[], object]) -> None:
            await asyncio.sleep(moment_s)
            what()

        async def change_workers() -> None:
            if drain_at_s is not None:
                await asyncio.sleep(drain_at_s)
                await workers[0].drain()
                await workers[1].run()

        async def play_rounds() -> None:
            for number, (lasts_s, pause_s) in enumerate(ends, start=1):
                await asyncio.sleep(lasts_s)
                desk.end_round()
                await asyncio.sleep(pause_s)
                desk.begin_round(versions[number])

        def lose(number: int) -> None:
            if number in desk.held:
                desk.lose(number)

        async with asyncio.TaskGroup() as happening:
            for at_s, number in losses:
                happening.create_task(at(at_s, lambda number=number: lose(number)))
            for number, (at_s, length, is_eval) in enumerate(tasks):
                task = a_task(number, length, require_version=0 if is_eval and at_s == 0 else None)
                happening.create_task(at(at_s, lambda task=task: desk.add(task)))
            happening.create_task(play_rounds())
            first = happening.create_task(workers[0].run())
            second = happening.create_task(change_workers())
            async with asyncio.timeout(20_000):
                await desk.until(lambda: len(desk.done) == len(tasks))
            first.cancel()
            second.cancel()
        assert desk.failures == {}
        for number, (_, length, _) in enumerate(tasks):
            trajectory = desk.done[number]
            assert trajectory.num_tokens == length
            assert_is_true(trajectory)
            sampled = [segment.version for segment in trajectory.segments]
            assert sampled == sorted(sampled)

    scene(script)
