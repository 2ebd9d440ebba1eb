"""Bug class 4: what starts while others are being aborted is lost, counted twice, or runs on."""

from __future__ import annotations

import asyncio
import random

import pytest
from fake_coordinator import a_task
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_scenes import SteppedEngine, Teacher, claim_while_generating, has_no_lease, play, until, whole, working

from offbeat.engines.protocol import Finish
from offbeat.worker.worker import begin, request_for

BUDGET = 30
FREELY = 10**9


@pytest.fixture(scope="module")
def engine():
    engine = SteppedEngine(0, num_slots=3)
    engine.steps_left = FREELY
    yield engine
    asyncio.run(engine.close())


moves = st.one_of(
    st.tuples(st.just("start"), st.integers(1, BUDGET)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("abort all"), st.just(0)),
    st.tuples(st.just("load"), st.integers(0, 3)),
    st.tuples(st.just("let go on"), st.integers(0, 3)),
)


@settings(max_examples=40)
@given(moves=st.lists(moves, max_size=25))
def test_in_any_order_of_start_abort_and_update_every_request_is_answered_once_and_none_runs_after_the_last_abort(
    engine, versions, moves
):
    async def scenario() -> None:
        started, others = [], []
        for move, number in moves:
            if move == "start":
                request = request_for(begin(a_task(len(started), number)))
                started.append((request, asyncio.create_task(engine.generate(request))))
                await asyncio.sleep(0)
            elif move == "abort" and number < len(started):
                others.append(asyncio.create_task(engine.abort([started[number][0].id])))
            elif move == "abort all":
                others.append(asyncio.create_task(engine.abort()))
            elif move == "load":
                others.append(asyncio.create_task(engine.load(versions[number])))
            elif move == "let go on":
                await asyncio.sleep(0.001 * number)
        await asyncio.gather(*others)
        await engine.abort()
        assert engine.is_idle
        for request, answer in started:
            generation = await answer
            ends = [0, *(segment.end for segment in generation.segments)]
            assert [segment.start for segment in generation.segments] == ends[:-1]
            wanted = request.sampling.max_new_tokens
            assert ends[-1] == wanted if generation.finish is Finish.LENGTH else ends[-1] < wanted

    play(scenario())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_however_rounds_end_nothing_runs_between_them_and_every_answer_is_taken_once(seed, tmp_path):
    """Two workers, of whom one is replaced, and a trainer that takes its time or none."""
    rng = random.Random(seed)

    async def scenario() -> None:
        async with whole(tmp_path) as made:
            teacher = Teacher(made, tmp_path)
            engines = [SteppedEngine(num_slots=rng.choice([1, 3, 8])) for _ in "abc"]
            num_partials = 0

            async def step() -> None:
                nonlocal num_partials
                await claim_while_generating(teacher, engines, rng.choice([1, 1, 2, 5]))
                for engine in engines:  # a few more at the very moment at which the round ends
                    engine.steps_left = rng.choice([0, 0, 1, 3])
                await until(lambda: has_no_lease(made), "the end of the round")
                assert all(engine.is_idle for engine in engines), "something ran on after its round"
                num_steps = [engine.metrics.num_steps for engine in engines]
                await asyncio.sleep(rng.choice([0.0, 0.0, 0.02]))
                assert [engine.metrics.num_steps for engine in engines] == num_steps, "something began between rounds"
                num_partials += made.step_figures()["partials"]
                await teacher.commit()

            await teacher.begin()
            async with working(made, engines[0], "a"):
                async with working(made, engines[1], "b") as leaving:
                    await step()
                    await step()
                    await asyncio.gather(leaving.drain(), step())
                async with working(made, engines[2], "c"):
                    for _ in range(3):
                        await step()
            assert num_partials > 0
            counts = await made.call(made.ledger.counts)
            taken = [member.task for batch in teacher.batches for group in batch.groups for member in group.members]
            assert len(taken) == len(set(taken)) == 6 * 4
            assert (counts.failed_tasks, counts.dropped_groups, counts.tokens.wasted) == ({}, {}, {})
            assert counts.trajectories.trained + counts.trajectories.waiting == counts.trajectories.accepted
            assert (await made.call(made.ledger.verify)).violations == ()

    play(scenario())
