"""The coordinator where work comes in rounds: who hears of what and when, and what a restart finds."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from coordinator_scenes import SOON_S, answer, coordinator, version

from offbeat.client.in_process import InProcessTrainer
from offbeat.ledger.records import Outcome
from offbeat.rules.leases import Lease
from offbeat.trajectory import Segment, Task, Trajectory

ROUNDS = {
    "schedule": {"max_staleness": 2, "over_provision": 2.0},
    "batch": {"groups_per_step": 2, "group_size": 2},
    "eval": {"every": 0},
}


def beginning(task: Task, number: int) -> Trajectory:
    partial = task.new_trajectory()
    partial.append(Segment(0, np.array([5, 6]), logprobs=np.full(2, -0.1), version=number, kv_version=number))
    return partial


async def answer_some(made, tasks: Sequence[Task], number: int) -> None:
    for i, task in enumerate(tasks):
        await made.submit("w", answer(made, task, number, right=i % 2 == 0), task.fence)


def test_over_provisioned_a_round_has_more_groups_under_way_than_its_step_trains_and_none_requires_a_version(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 100, 0, SOON_S)
            assert len(lease.tasks) == 2 * 2 * 2
            assert {task.require_version for task in lease.tasks} == {None}
            assert lease.round == 0

    asyncio.run(scenario())


def test_who_waits_for_the_end_of_a_round_hears_of_it_when_the_batch_is_claimed(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            assert not await made.rounds.is_over(0, 0.0)
            waiting = asyncio.create_task(made.rounds.is_over(0, SOON_S))
            await answer_some(made, tasks[:4], 0)
            await asyncio.sleep(0)
            assert not waiting.done(), "the round goes on until the trainer asks for its batch"
            await made.claim(0, SOON_S)
            assert await waiting
            assert (await made.lease("w", 100, 0, 0.0)).tasks == ()
            await made.commit(0, version(1, 1, 0))
            assert await made.rounds.is_over(0, 0.0), "what belonged to a round before is over as well"
            assert not await made.rounds.is_over(1, 0.0)

    asyncio.run(scenario())


def test_beginnings_that_were_handed_back_are_carried_on_in_the_next_round_with_its_version(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            await answer_some(made, tasks[:4], 0)
            await made.claim(0, SOON_S)
            for task in tasks[4:7]:
                assert await made.submit("w", beginning(task, 0), task.fence) is Outcome.PARTIAL
            await made.give_back("w", [(tasks[7].id, tasks[7].fence)])
            assert made.step_figures() == {
                "partials": 3,
                "partial_tokens": 6,
                "resumed_tokens": 0,
                "over_provision": 2.0,
                "workers": 1,
                "idle_workers": 0,
            }
            await made.commit(0, version(1, 1, 0))
            assert (await made.lease("w", 100, 0, SOON_S)).version == version(1, 1, 0), "it has nothing else to do"
            again = (await made.lease("w", 100, 1, SOON_S)).tasks
            assert [task.id for task in again[:4]] == [task.id for task in tasks[4:]]
            assert [None if task.prefix is None else task.prefix.num_tokens for task in again[:4]] == [2, 2, 2, None]
            assert len(again) == 8, "topped up to twice what a step trains"
            resumed = sum(len(task.prompt) + 2 for task in again[:3])
            assert made.step_figures()["resumed_tokens"] == resumed
            assert made.step_figures()["resumed_tokens"] == 0
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())


def test_who_is_given_back_a_task_may_hand_it_to_another_and_a_late_word_of_it_changes_nothing(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            (task,) = (await made.lease("w", 1, 0, SOON_S)).tasks
            await made.give_back("w", [(task.id, task.fence)])
            (again,) = (await made.lease("v", 1, 0, SOON_S)).tasks
            assert (again.id, again.fence) == (task.id, task.fence + 1)
            await made.give_back("w", [(task.id, task.fence), (10**9, 1)])
            await made.give_back("w", [(again.id, again.fence)])
            assert made.lease_manager.leases.is_held(Lease(again.id, again.fence, "v"))
            assert await made.submit("v", answer(made, again, 0, True), again.fence) is Outcome.STORED

    asyncio.run(scenario())


def test_evaluation_is_handed_out_between_rounds(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **{**ROUNDS, "eval": {"every": 1, "prompts": 3}}) as made:
            await made.publish(version(0, 0))
            lease = await made.lease("w", 4, 0, SOON_S)
            assert [task.require_version for task in lease.tasks] == [0, 0, 0, None]
            tasks = [*lease.tasks[3:], *(await made.lease("w", 3, 0, SOON_S)).tasks]
            await answer_some(made, tasks, 0)
            await made.claim(0, SOON_S)
            for task in lease.tasks[:3]:
                await made.give_back("w", [(task.id, task.fence)])
            between = await made.lease("w", 100, 0, SOON_S)
            assert [task.require_version for task in between.tasks] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_worker_to_which_every_version_comes_too_late_works_all_the_same(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            await made.give_back("w", [(task.id, task.fence) for task in tasks[-1:]])
            (slow,) = (await made.lease("slow", 1, 0, SOON_S)).tasks
            await made.give_back("slow", [(slow.id, slow.fence)])
            await answer_some(made, tasks[:4], 0)
            await made.claim(0, SOON_S)
            await made.commit(0, version(1, 1, 0))
            assert (await made.lease("slow", 1, 0, SOON_S)).version == version(1, 1, 0)
            await answer_some(made, tasks[4:7], 0)
            (last,) = (await made.lease("w", 1, 1, SOON_S)).tasks
            await answer_some(made, [last], 1)
            await made.claim(1, SOON_S)
            await made.commit(1, version(2, 2, 1))
            assert len((await made.lease("slow", 1, 1, SOON_S)).tasks) == 1, "version 1 is new to it, if to nobody else"

    asyncio.run(scenario())


@pytest.mark.parametrize("keep_leases", [True, False])
def test_a_restart_finds_the_round_as_it_was(tmp_path, keep_leases):
    async def before():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            await answer_some(made, tasks[:4], 0)
            await made.claim(0, SOON_S)
            return tasks[4:]
            # and then it dies

    async def after(left):
        async with coordinator(tmp_path, keep_leases=keep_leases, **ROUNDS) as made:
            assert await made.rounds.is_over(0, 0.0)
            assert (await made.lease("v", 100, 0, 0.0)).tasks == ()
            assert await made.submit("w", beginning(left[0], 0), left[0].fence) is Outcome.PARTIAL
            await made.claim(0, SOON_S)
            await made.commit(0, version(1, 1, 0))
            await made.give_back("w", [(task.id, task.fence) for task in left[1:]])
            assert {task.id for task in left} <= {task.id for task in (await made.lease("v", 100, 1, SOON_S)).tasks}
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(after(asyncio.run(before())))


def test_a_trainer_that_resumes_ends_the_round_of_what_it_left_behind_and_replays_its_batch_before_the_next(tmp_path):
    async def scenario():
        async with coordinator(tmp_path, **ROUNDS) as made:
            await made.publish(version(0, 0))
            tasks = (await made.lease("w", 100, 0, SOON_S)).tasks
            await answer_some(made, tasks[:4], 0)
            batch = await made.claim(0, SOON_S)
            await made.commit(0, version(1, 1, 0))
            waiting = asyncio.create_task(made.rounds.is_over(1, SOON_S))
            await asyncio.sleep(0)
            trainer = InProcessTrainer(made)
            reconciled = await trainer.reconcile(0, 0)
            assert reconciled.replays_batch
            assert await waiting
            await trainer.publish(version(2, 0, 0))
            assert await made.rounds.is_over(2, 0.0), "its batch is claimed already"
            again = await trainer.claim(0, SOON_S)
            assert [group.group for group in again.groups] == [group.group for group in batch.groups]
            await trainer.commit(0, version(3, 1, 2))
            assert not await made.rounds.is_over(3, 0.0)
            assert (await made.call(made.ledger.verify)).violations == ()

    asyncio.run(scenario())
