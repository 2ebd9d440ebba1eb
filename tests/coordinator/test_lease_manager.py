"""Leases at a coordinator: who loses a task, who is given it next, and who is to blame."""

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from coordinator_scenes import SOON_S, answer, coordinator, version

from offbeat.coordinator import lease_manager
from offbeat.ledger.errors import Fenced
from offbeat.ledger.records import Outcome
from offbeat.rules.leases import Lease
from offbeat.trajectory import Segment, Task


async def lease_all(made) -> list[tuple[int, int]]:
    """What worker w holds from then on, by task and fence."""
    await made.publish(version(0, 0))
    lease = await made.lease("w", 100, 0, SOON_S)
    return [(task.id, task.fence) for task in lease.tasks]


def test_a_worker_that_falls_silent_loses_its_tasks_to_another(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.2}) as made:
            await made.publish(version(0, 0))
            silent = await made.lease("silent", 100, 0, SOON_S)
            other = await made.lease("other", 1, 0, SOON_S)  # waits until the leases are over
            task = other.tasks[0]
            assert task.fence == 2
            beat = await made.heartbeat("silent", [(task.id, task.fence - 1)])
            assert beat.lost == (task.id,)
            before = next(t for t in silent.tasks if t.id == task.id)
            with pytest.raises(Fenced):
                await made.submit("silent", answer(made, before, 0, True), before.fence)
            assert await made.submit("other", answer(made, task, 0, True), task.fence) is Outcome.STORED

    asyncio.run(scenario())


def test_a_worker_that_goes_on_beating_keeps_its_tasks(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.6}) as made:
            held = await lease_all(made)
            for _ in range(8):
                assert (await made.heartbeat("w", held)).lost == ()
                await asyncio.sleep(0.15)
            assert (await made.lease("other", 100, 0, 0.0)).tasks == ()

    asyncio.run(scenario())


def test_a_coordinator_that_stood_still_itself_takes_no_task_from_anybody(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.5}) as made:
            held = await lease_all(made)
            await asyncio.sleep(0.1)  # the watch over leases begins to wait
            time.sleep(1.5)  # noqa: ASYNC251 - the loop itself is to stand still
            await asyncio.sleep(0.1)  # as long as a heartbeat may take that waited in a socket meanwhile
            assert (await made.heartbeat("w", held)).lost == ()

    asyncio.run(scenario())


def test_a_heartbeat_counts_from_when_it_came_however_long_the_disk_takes(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.8}) as made:
            held = await lease_all(made)
            slow = asyncio.create_task(made.call(time.sleep, 1.8))
            beats = []
            while not slow.done():
                beats.append(asyncio.create_task(made.heartbeat("w", held)))
                await asyncio.sleep(0.2)
            assert {beat.lost for beat in await asyncio.gather(*beats)} == {()}
            assert (await made.lease("other", 100, 0, 0.0)).tasks == ()

    asyncio.run(scenario())


def test_after_a_restart_workers_find_their_leases_as_they_left_them(tmp_path):
    async def before():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            return (await made.lease("w", 100, 0, SOON_S)).tasks

    async def after(tasks):
        async with coordinator(tmp_path, keep_leases=True) as made:
            assert (await made.lease("other", 100, 0, 0.0)).tasks == ()
            assert (await made.heartbeat("w", [(task.id, task.fence) for task in tasks])).lost == ()
            assert await made.submit("w", answer(made, tasks[0], 0, True), 1) is Outcome.STORED

    asyncio.run(after(asyncio.run(before())))


def test_a_worker_that_leaves_gives_its_tasks_back_at_once_and_a_partial_is_carried_on(tmp_path):
    async def scenario():
        async with coordinator(tmp_path) as made:
            await made.publish(version(0, 0))
            first, *rest = (await made.lease("a", 100, 0, SOON_S)).tasks
            partial = first.new_trajectory()
            partial.append(Segment(0, np.array([5, 6]), logprobs=np.full(2, -0.1), version=0, kv_version=0))
            assert await made.submit("a", partial, 1) is Outcome.PARTIAL
            await made.leave("a")
            lease = await made.lease("b", 100, 0, SOON_S)
            assert len(lease.tasks) == 1 + len(rest)
            again = next(task for task in lease.tasks if task.id == first.id)
            assert again.prefix == partial
            assert again.fence == 2

    asyncio.run(scenario())


def test_a_worker_that_begins_a_new_life_loses_at_once_what_it_does_not_name(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"max_attempts": 1}, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            first, second = (await made.lease("w", 2, 0, SOON_S)).tasks
            assert (await made.heartbeat("w", [(first.id, 1), (second.id, 1)], life="one")).lost == ()
            assert (await made.heartbeat("w", [(first.id, 1)], life="two")).lost == ()  # that one is in its spool
            counts = await made.call(made.ledger.counts)
            assert counts.failed_tasks == {"lost": 1}  # alone to blame, at its only attempt
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_who_waits_for_another_suspect_is_handed_it_as_soon_as_one_ends(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, eval={"every": 0}) as made:
            await made.publish(version(0, 0))
            assert len((await made.lease("w", 100, 0, SOON_S)).tasks) == 8
            await made.heartbeat("w", [], life="one")
            await made.heartbeat("w", [], life="two")  # it died with all of them
            (suspect,) = (await made.lease("w", 8, 0, SOON_S)).tasks  # few at a time
            waiting = asyncio.create_task(made.lease("w", 7, 0, SOON_S))
            while not made._work.changed._waiters:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await made.submit("w", answer(made, suspect, 0, True), suspect.fence)
            assert len((await waiting).tasks) == 1

    asyncio.run(scenario())


def test_a_task_that_a_living_worker_never_heard_of_goes_to_another_and_nobody_is_blamed(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.3, "max_attempts": 1}) as made:
            await made.publish(version(0, 0))
            (unheard,) = (await made.lease("w", 1, 0, SOON_S)).tasks  # and the answer is lost on its way
            async with asyncio.timeout(SOON_S):
                while await made.call(made.ledger.leased):
                    await made.heartbeat("w", [])
                    await asyncio.sleep(0.05)
            again = (await made.lease("other", 1, 0, SOON_S)).tasks[0]
            assert (again.id, again.fence) == (unheard.id, 2)
            assert (await made.call(made.ledger.counts)).failed_tasks == {}

    asyncio.run(scenario())


def test_suspects_that_failed_for_good_are_forgotten(tmp_path, monkeypatch):
    """Whoever hands a suspect in clears it; one whose attempts are used up is never handed in."""
    monkeypatch.setattr(lease_manager, "MIN_SUSPECTS", 2)

    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 600.0, "max_attempts": 1}) as made:
            held = await lease_all(made)
            await made.heartbeat("w", held, "one life")
            await made.heartbeat("w", held[1:], "another life")  # the first is to blame, and fails at once
            await made.heartbeat("w", held[2:], "a third")
            await made.heartbeat("w", held[3:], "a fourth")
            assert len(made.lease_manager._suspects) < 3

    asyncio.run(scenario())


async def answer_as_they_come(made, worker: str, seconds: float) -> None:
    """Answers one task after the other, for ever, each after so long; no heartbeat may say that it is lost."""
    while True:
        for task in (await made.lease(worker, 1, 0, SOON_S)).tasks:
            await asyncio.sleep(seconds)
            assert (await made.heartbeat(worker, [(task.id, task.fence)])).lost == ()
            assert await made.submit(worker, answer(made, task, 0, True), task.fence) is Outcome.STORED


async def beat_for_ever(made, worker: str, tasks) -> None:
    while True:
        await made.heartbeat(worker, [(task.id, task.fence) for task in tasks])
        await asyncio.sleep(0.05)


@pytest.mark.full
def test_a_hoarder_loses_its_tasks_to_the_others_and_a_worker_ten_times_slower_keeps_its_own(tmp_path):
    """Heartbeats alone once kept a task for ever."""

    async def scenario():
        told = []
        sections = {"batch": {"groups_per_step": 8, "group_size": 4}, "eval": {"every": 0}}
        rollout = {"lease_s": 0.8, "max_attempts": 1, "max_new_tokens": 16}
        async with coordinator(tmp_path, rollout=rollout, **sections) as made:
            made.on_report = told.append
            await made.publish(version(0, 0))
            hoarded = (await made.lease("hoarder", 8, 0, SOON_S)).tasks
            slow = asyncio.create_task(answer_as_they_come(made, "slow", 0.05))
            quick = [asyncio.create_task(answer_as_they_come(made, f"quick-{n}", 0.005)) for n in range(3)]
            beating = asyncio.create_task(beat_for_ever(made, "hoarder", hoarded))
            batch = await made.claim(0, SOON_S)  # which needs what the hoarder has
            assert len(batch.groups) == 8
            (event,) = told
            assert (event["event"], event["worker"]) == ("set_aside", "hoarder")
            assert (await made.lease("hoarder", 8, 0, 0.0)).tasks == ()
            assert (await made.call(made.ledger.counts)).failed_tasks == {}
            assert (await made.call(made.ledger.verify)).violations == ()
            for task in (slow, *quick, beating):
                assert not task.done(), task.exception()
                task.cancel()

    asyncio.run(scenario())


async def hoard(made, *, is_alone: bool = False) -> list[Task]:
    """What worker w holds that has answered once, quickly, and then nothing for a long time."""
    await made.publish(version(0, 0))
    first, *rest = (await made.lease("w", 100, 0, SOON_S)).tasks
    await made.submit("w", answer(made, first, 0, True), first.fence)
    if not is_alone:
        assert (await made.lease("other", 1, 0, 0.0)).tasks == ()
    made.lease_manager.pace.add_quiet_time(1e9, made.lease_manager.leases.all())
    return rest


@asynccontextmanager
async def patient(tmp_path):
    """A coordinator that comes to look at hoarders when it is told to, or a second later."""
    async with coordinator(tmp_path, rollout={"lease_s": 600.0}) as made:
        yield made


def test_a_hoarder_s_late_answer_is_welcome_while_nobody_else_has_begun(tmp_path):
    async def scenario():
        async with patient(tmp_path) as made:
            task, *_ = await hoard(made)
            async with asyncio.timeout(SOON_S):
                while not made.fitness.aside():  # noqa: ASYNC110 - the watch over leases looks every second
                    await asyncio.sleep(0.02)
            assert set(made.fitness.aside()) == {"w"}
            while len(made.lease_manager.leases):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert (await made.heartbeat("w", [(task.id, task.fence)])).lost == (task.id,)
            assert await made.submit("w", answer(made, task, 0, True), task.fence) is Outcome.STORED

    asyncio.run(scenario())


def test_who_is_alone_keeps_its_tasks_however_long_it_takes(tmp_path):
    async def scenario():
        async with patient(tmp_path) as made:
            tasks = await hoard(made, is_alone=True)
            await made.lease_manager._take_from_hoarders()
            assert made.fitness.aside() == {}
            assert (await made.heartbeat("w", [(task.id, task.fence) for task in tasks])).lost == ()

    asyncio.run(scenario())


def test_an_answer_that_waits_for_the_disk_is_no_hoarder_s(tmp_path):
    async def scenario():
        async with patient(tmp_path) as made:
            task, *_ = await hoard(made)
            slow = asyncio.create_task(made.call(time.sleep, 0.2))
            submitted = asyncio.create_task(made.submit("w", answer(made, task, 0, True), task.fence))
            await asyncio.sleep(0.05)
            await made.lease_manager._take_from_hoarders()
            await asyncio.gather(slow, submitted)
            assert made.fitness.aside() == {}

    asyncio.run(scenario())


def test_the_same_answer_again_is_none(tmp_path):
    async def scenario():
        async with patient(tmp_path) as made:
            task, *_ = await hoard(made)
            await made.submit("w", answer(made, task, 0, True), task.fence)
            made.lease_manager.pace.add_quiet_time(1e9, made.lease_manager.leases.all())
            assert await made.submit("w", answer(made, task, 0, True), task.fence) is Outcome.REPEATED
            assert set(made.lease_manager.pace.overdue()) == {"w"}

    asyncio.run(scenario())


def test_time_in_which_the_coordinator_stood_still_makes_nobody_a_hoarder(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, rollout={"lease_s": 0.5}) as made:
            held = await lease_all(made)
            made.lease_manager.pace.granted(Lease(1000, 1, "w"), 0)
            made.lease_manager.pace.handed_in(Lease(1000, 1, "w"), 100)  # at once: its bound is 2 leases
            await asyncio.sleep(0.1)  # the watch over leases begins to wait
            time.sleep(1.5)  # noqa: ASYNC251 - the loop itself is to stand still
            await made.lease("other", 1, 0, 0.0)
            assert (await made.heartbeat("w", held)).lost == ()
            await asyncio.sleep(0.1)
            assert made.lease_manager.pace.overdue() == made.fitness.aside() == {}

    asyncio.run(scenario())
