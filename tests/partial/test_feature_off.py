"""Bug class 11: answers are cut and carried on, and trained as if they were whole, where nobody asked for that."""

from __future__ import annotations

import asyncio

import pytest
from partial_scenes import SteppedEngine, Teacher, play, until, whole, working

FREELY = 10**9


@pytest.mark.parametrize("schedule", [{}, {"mode": "alternate", "max_staleness": 0, "over_provision": 1.0}])
def test_without_a_bound_every_answer_that_is_trained_is_one_piece_of_the_version_it_trains(schedule, tmp_path):
    async def scenario() -> None:
        async with whole(tmp_path, schedule=schedule) as made:
            teacher, engine = Teacher(made, tmp_path), SteppedEngine(num_slots=16)
            engine.steps_left = FREELY
            await teacher.begin()
            async with working(made, engine) as worker:
                for _ in range(3):
                    batch = await teacher.claim()
                    assert not worker.running, "more was begun than is trained"
                    figures = made.step_figures()
                    assert (figures["partials"], figures["partial_tokens"], figures["over_provision"]) == (0, 0, 1.0)
                    for group in batch.groups:
                        for member in group.members:
                            (segment,) = member.trajectory.segments
                            assert segment.version == segment.kv_version == batch.from_version
                            assert set(member.staleness.tolist()) == {0}
                    await teacher.commit()
            counts = await made.call(made.ledger.counts)
            assert (counts.tokens.partial, counts.max_staleness_trained) == (0, 0)

    play(scenario())


def test_without_a_bound_what_a_leaving_worker_hands_back_is_carried_on_by_the_same_version(tmp_path):
    """Such an answer has two pieces, and could as well have one: both are of the version that is trained."""

    async def scenario() -> None:
        async with whole(tmp_path, schedule={}) as made:
            teacher = Teacher(made, tmp_path)
            first, second = SteppedEngine(num_slots=16), SteppedEngine(num_slots=16)
            await teacher.begin()
            async with working(made, first, "a") as leaving:
                await until(lambda: first.num_requests == 4, "leases")
                assert {one.task.require_version for one in leaving.running.values()} == {0}
                await first.take(2)
                await leaving.drain()
            second.steps_left = FREELY
            async with working(made, second, "b"):
                batch = await teacher.claim()
            members = [member for group in batch.groups for member in group.members]
            assert {len(member.trajectory.segments) for member in members} <= {1, 2}
            assert any(len(member.trajectory.segments) == 2 for member in members)
            for member in members:
                assert {segment.version for segment in member.trajectory.segments} == {batch.from_version}
                assert set(member.staleness.tolist()) == {0}

    play(scenario())


def test_where_answers_are_to_end_as_they_began_none_is_carried_over_into_new_weights(tmp_path):
    async def scenario() -> None:
        schedule = {"mode": "overlap", "max_staleness": 2, "new_version": "finish"}
        async with whole(tmp_path, schedule=schedule) as made:
            teacher, engine = Teacher(made, tmp_path), SteppedEngine(num_slots=4)
            engine.steps_left = FREELY
            await teacher.begin()
            async with working(made, engine, finishes=True):
                for _ in range(4):
                    batch = await teacher.claim()
                    for group in batch.groups:
                        for member in group.members:
                            assert len(member.trajectory.segments) == 1
                    await teacher.commit()
                    await asyncio.sleep(0)

    play(scenario())
