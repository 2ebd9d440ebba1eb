"""Bug class 6: tokens carry the version that was served when their answer arrived, not the one that sampled them."""

from __future__ import annotations

import asyncio

from fake_coordinator import Desk, a_task
from partial_scenes import (
    SteppedEngine,
    Teacher,
    assert_logprobs_are_the_versions_own,
    claim_while_generating,
    play,
    until,
    whole,
    working,
)
from worker_scenes import at_work

from offbeat.client.in_process import InProcessWorker
from offbeat.ledger.records import Outcome
from offbeat.trajectory import Trajectory
from offbeat.worker.worker import Worker


def test_an_update_between_request_and_answer_splits_the_answer_where_it_came(versions):
    async def scenario() -> Trajectory:
        desk, engine = Desk(), SteppedEngine(0)
        desk.publish(versions[0])
        desk.add(a_task(1, 30))
        async with at_work(Worker("w", engine, desk)):
            await engine.take(5)
            desk.publish(versions[1])
            await until(lambda: engine.version == 1, "the update")
            await engine.take(7)
            desk.publish(versions[2])
            await until(lambda: engine.version == 2, "the update")
            await engine.take(18)
            await desk.until(lambda: 1 in desk.done)
        await engine.close()
        return desk.done[1]

    answer = play(scenario())
    assert [(s.start, s.end, s.version) for s in answer.segments] == [(0, 5, 0), (5, 12, 1), (12, 30, 2)]
    assert_logprobs_are_the_versions_own(answer)


class SlowLine(InProcessWorker):
    """Beginnings reach the coordinator only once the line is free."""

    def __init__(self, *args):
        super().__init__(*args)
        self.free, self.waiting = asyncio.Event(), list[Trajectory]()

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        if trajectory.is_partial:
            self.waiting.append(trajectory)
            await self.free.wait()
        return await super().submit(trajectory, fence)


def test_what_was_cut_before_an_update_and_arrives_after_it_is_of_the_version_before(tmp_path):
    async def scenario() -> None:
        async with whole(tmp_path) as made:
            teacher, engine, line = Teacher(made, tmp_path), SteppedEngine(), SlowLine(made, "w")
            await teacher.begin()

            async with working(made, engine, client=line):
                await claim_while_generating(teacher, [engine])
                await until(lambda: line.waiting, "a beginning to be handed back")
                await teacher.commit()
                await until(lambda: engine.version == 1, "the update")
                cut = {partial.task: partial.num_tokens for partial in line.waiting}
                line.free.set()
                engine.steps_left = 10**9
                for _ in range(3):
                    await teacher.claim()
                    await teacher.commit()
            found = {
                member.task: member.trajectory
                for batch in teacher.batches
                for group in batch.groups
                for member in group.members
            }
            carried_on = {task: found[task] for task in cut if task in found}
            assert carried_on
            for task, answer in carried_on.items():
                first, second = answer.segments[:2]
                assert (first.start, first.end, first.version) == (0, cut[task], 0)
                assert second.version >= 1
                assert_logprobs_are_the_versions_own(answer)
            assert (await made.call(made.ledger.verify)).violations == ()

    play(scenario())
