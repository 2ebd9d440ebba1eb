"""Bug class 8: a flush of keys and values does nothing while requests run, and nobody hears of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from partial_scenes import (
    SteppedEngine,
    assert_logprobs_are_the_versions_own,
    handed_on,
    model_of,
    new_stepper,
    own_task,
    play,
)

from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import EngineError, Finish
from offbeat.worker.worker import ActiveTask, append, begin, request_for

BUDGET = 40
NUM_PROMPT = len(own_task(0, 1).prompt)


def submit(stepper: Stepper, running: ActiveTask) -> ActiveTask:
    stepper.submit(request_for(running))
    return running


def finish(stepper: Stepper, *all_running: ActiveTask) -> None:
    by_id = {running.request_id: running for running in all_running}
    while not stepper.is_idle:
        for generation in stepper.step():
            assert append(by_id[generation.id].trajectory, generation)


def under_load(stepper: Stepper) -> tuple[list[ActiveTask], list[ActiveTask]]:
    """Answers that run, and others that were cut and are still held."""
    running = [submit(stepper, begin(own_task(number, BUDGET))) for number in range(4)]
    cut = [submit(stepper, begin(own_task(number, BUDGET))) for number in range(4, 8)]
    for _ in range(10):
        assert stepper.step() == []
    by_id = {one.request_id: one for one in cut}
    for generation in stepper.abort(list(by_id)):
        assert generation.finish is Finish.ABORT
        append(by_id[generation.id].trajectory, generation)
    assert len(stepper.cached) == 4
    return running, [begin(handed_on(one.task, one)) for one in cut]


@pytest.mark.parametrize("exact", [False, True])
def test_after_an_update_under_load_nothing_is_taken_from_before_it(versions, exact):
    stepper = new_stepper(exact=exact)
    with torch.inference_mode():
        running, cut = under_load(stepper)
        before = stepper.metrics
        stepper.load(1, stage(stepper.model, versions[1]))
        assert len(stepper.cached) == 0
        for one in cut:
            submit(stepper, one)
        finish(stepper, *running, *cut)
    assert stepper.metrics.num_resumed_tokens == before.num_resumed_tokens == 0
    assert stepper.metrics.num_prefilled_tokens > before.num_prefilled_tokens
    for one in (*running, *cut):
        assert [(s.version, s.kv_version) for s in one.trajectory.segments] == [(0, 0), (1, 1)]
    for one in (*running, *cut):
        assert_logprobs_are_the_versions_own(one.trajectory)


@pytest.mark.parametrize("exact", [False, True])
def test_without_an_update_what_was_cut_goes_on_where_it_was_held(exact):
    """So that the test above cannot hold because nothing is ever held."""
    stepper = new_stepper(exact=exact)
    with torch.inference_mode():
        running, cut = under_load(stepper)
        num_prefilled = stepper.metrics.num_prefilled_tokens
        for one in cut:
            submit(stepper, one)
        finish(stepper, *running, *cut)
    assert stepper.metrics.num_resumed_tokens == 4 * (NUM_PROMPT + 10 - 1)
    assert stepper.metrics.num_prefilled_tokens == num_prefilled
    for one in (*running, *cut):
        assert_logprobs_are_the_versions_own(one.trajectory)


def test_an_update_that_fails_under_load_says_so_and_leaves_old_weights_with_old_keys_and_values(versions, tmp_path):
    model_of(1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    torn = replace(versions[1], path=tmp_path)

    async def scenario() -> ActiveTask:
        engine, running = SteppedEngine(0), begin(own_task(1, BUDGET))
        waiting = asyncio.create_task(engine.generate(request_for(running)))
        await engine.take(10)
        with pytest.raises(EngineError):
            await engine.load(torn)
        assert engine.version == 0
        await engine.abort()
        assert not append(running.trajectory, await waiting)
        again = begin(handed_on(running.task, running))
        engine.steps_left = 10**9
        assert append(again.trajectory, await engine.generate(request_for(again)))
        assert engine.metrics.num_resumed_tokens == NUM_PROMPT + 10 - 1
        await engine.close()
        return again

    again = play(scenario())
    assert {(s.version, s.kv_version) for s in again.trajectory.segments} == {(0, 0)}
    assert_logprobs_are_the_versions_own(again.trajectory)
