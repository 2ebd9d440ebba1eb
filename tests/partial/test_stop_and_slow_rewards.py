"""Bug class 3: stopping waits for a slow reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator_scenes import answer
from partial_scenes import SOON_S, SteppedEngine, Teacher, has_no_lease, num_ready, play, until, whole, working


def gated(folder: Path):
    """A reward that hangs while the gate is shut, and says that it was called."""

    def reward(response: str) -> float:
        import time

        (folder / "called").touch()
        while (folder / "shut").exists():
            time.sleep(0.01)
        return float(len(response))

    return reward


def test_a_round_ends_and_the_next_is_trained_while_a_reward_hangs_which_counts_later(tmp_path):
    shut, called = tmp_path / "shut", tmp_path / "called"

    async def scenario() -> None:
        sections = {"reward": {"timeout_s": 600.0}, "batch": {"groups_per_step": 1, "group_size": 2}}
        schedule = {"max_staleness": 3, "over_provision": 4.0}
        async with whole(tmp_path, function=gated(tmp_path), schedule=schedule, **sections) as made:
            teacher, engine = Teacher(made, tmp_path), SteppedEngine(num_slots=4)
            await teacher.begin()
            by_hand = (await made.lease("hand", 4, 0, SOON_S)).tasks
            async with working(made, engine) as worker:
                await until(lambda: engine.num_requests == 4, "leases")
                await engine.take(3)
                await submit(made, by_hand[:2])
                await until(lambda: num_ready(made), "the first group")

                shut.touch()
                called.unlink()
                await submit(made, by_hand[2:])
                await until(called.exists, "a reward that hangs")

                await teacher.claim()
                await until(lambda: not worker.running and has_no_lease(made), "the end of the round")
                counts = await made.call(made.ledger.counts)
                assert counts.tokens.partial == 4 * 3, "beginnings were not handed back"
                await teacher.commit()
                await until(lambda: engine.version == 1 and len(worker.running) == 4, "the next round")
                assert {one.trajectory.num_tokens for one in worker.running.values()} == {3}

                assert [one.task for one in await made.call(made.ledger.unscored, 100)] == [t.id for t in by_hand[2:]]
                assert counts.failed_tasks == {}
                waiting = asyncio.create_task(teacher.claim())
                await asyncio.sleep(0)
                assert not waiting.done(), "there was something to wait for after all"
                shut.unlink()
                batch = await waiting
            (group,) = batch.groups
            assert [member.task for member in group.members] == [task.id for task in by_hand[2:]]
            assert all(member.reward > 0 for member in group.members)
            assert {stale for member in group.members for stale in member.staleness.tolist()} == {1}
            assert (await made.call(made.ledger.verify)).violations == ()

    async def submit(made, tasks) -> None:
        for task in tasks:
            await made.submit("hand", answer(made, task, 0, right=True), task.fence)

    play(scenario())
