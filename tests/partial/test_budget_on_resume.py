"""Bug class 1: an answer that is carried on asks for its full budget again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_coordinator import Desk, a_task
from hypothesis import given, settings
from hypothesis import strategies as st
from partial_scenes import END_TOKEN, SteppedEngine, carry_on_in_parts, handed_on, new_stepper, play
from worker_scenes import at_work

from offbeat.trajectory import End, Sampling, Segment, Task
from offbeat.worker.worker import Worker, append, begin, request_for

BUDGET = 12
NUM_PROMPT = len(a_task(0).prompt)


def cut(task: Task, tokens: Segment, at: int) -> Task:
    """The task after its answer was cut at a position."""
    running = begin(task)
    if at:
        part = replace(tokens, tokens=tokens.tokens[:at], logprobs=tokens.logprobs[:at])
        running.trajectory.append(part)
    return handed_on(task, running)


def test_cut_at_any_position_an_answer_keeps_to_its_budget_and_the_context(versions):
    """The engine's context has room for prompt and budget, and not for one token more."""

    async def scenario() -> tuple[Desk, list[Task], Segment]:
        desk, task = Desk(), replace(a_task(0, BUDGET), seed=3)
        engine = SteppedEngine(0, max_context_tokens=NUM_PROMPT + BUDGET, num_slots=BUDGET + 1)
        engine.steps_left = 10**6
        whole = begin(task)
        assert append(whole.trajectory, await engine.generate(request_for(whole)))
        (tokens,) = whole.trajectory.segments
        tasks = [cut(replace(task, id=at), tokens, at) for at in range(BUDGET + 1)]
        desk.publish(versions[0])
        desk.add(*tasks)
        async with at_work(Worker("w", engine, desk)):
            await desk.until(lambda: len(desk.done) + len(desk.failures) == len(tasks))
        await engine.close()
        return desk, tasks, tokens

    desk, tasks, whole = play(scenario())
    assert desk.failures == {}
    for at, task in enumerate(tasks):
        assert desk.done[at].tokens.tolist() == whole.tokens.tolist()
        assert desk.done[at].end is End.LENGTH
        assert task.sampling == Sampling(max_new_tokens=BUDGET), "what a caller handed in was changed"
        assert (task.prefix.num_tokens if task.prefix else 0) == at, "what a caller handed in was changed"


@pytest.fixture(scope="module")
def stepper():
    return new_stepper(max_context_tokens=NUM_PROMPT + BUDGET)


@settings(max_examples=40)
@given(cuts=st.lists(st.integers(0, BUDGET), max_size=8), seed=st.integers(0, 10**6), stops=st.booleans())
def test_however_often_it_is_cut_an_answer_is_never_longer_than_its_budget(stepper, cuts, seed, stops):
    task = replace(a_task(0, BUDGET, sampling={"stop_token_ids": (END_TOKEN,) if stops else ()}), seed=seed)
    trajectory = carry_on_in_parts(stepper, task, cuts)
    has_stopped = stops and trajectory.tokens[-1] == END_TOKEN
    assert trajectory.end is (End.STOP if has_stopped else End.LENGTH)
    assert trajectory.num_tokens <= BUDGET
    assert has_stopped or trajectory.num_tokens == BUDGET
    assert task.sampling.max_new_tokens == BUDGET
