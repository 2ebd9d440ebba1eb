"""Bug class 7: after an update, keys and values that older weights computed are served."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_coordinator import Desk
from partial_scenes import (
    SteppedEngine,
    assert_logprobs_are_the_versions_own,
    carry_on_in_parts,
    new_stepper,
    own_task,
    play,
    until,
)
from worker_scenes import at_work

from offbeat.engines.protocol import KvMode
from offbeat.worker.worker import Worker

BUDGET = 40
CUT = 15
NUM_TASKS = 4


@pytest.mark.parametrize("kv", [KvMode.SAME, KvMode.REFILL])
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_carried_on_after_an_update_attends_to_nothing_that_older_weights_computed(versions, kv, exact):
    """The same engine carries on what it was cut in the middle of, and still has the keys and values of: in vain."""

    async def scenario() -> tuple[Desk, int]:
        desk, engine = Desk(), SteppedEngine(0, exact=exact)
        desk.begin_round(versions[0])
        desk.add(*(own_task(number, BUDGET) for number in range(NUM_TASKS)))
        async with at_work(Worker("w", engine, desk, kv=kv)):
            await until(lambda: engine.num_requests == NUM_TASKS, "leases")
            await engine.take(CUT)
            desk.end_round()
            await desk.until(lambda: len(desk.partials) == NUM_TASKS)
            desk.begin_round(versions[1])
            engine.steps_left = 10**9
            await desk.until(lambda: len(desk.done) == NUM_TASKS)
        await engine.close()
        return desk, engine.metrics.num_resumed_tokens

    desk, num_resumed = play(scenario())
    assert num_resumed == 0, "something was taken from before the update"
    for answer in desk.done.values():
        assert [(s.version, s.kv_version) for s in answer.segments] == [(0, 0), (1, 1)]
        assert_logprobs_are_the_versions_own(answer)


def test_an_answer_is_that_of_an_engine_that_never_had_other_weights(versions):
    """Log-probs after an update, to the bit, from an exact engine that was updated and one that began with the new."""

    async def scenario() -> Desk:
        desk, engine = Desk(), SteppedEngine(0, exact=True)
        desk.begin_round(versions[0])
        desk.add(own_task(1, BUDGET))
        async with at_work(Worker("w", engine, desk)):
            await engine.take(CUT)
            desk.end_round()
            await desk.until(lambda: desk.partials)
            desk.add(own_task(2, BUDGET))
            desk.begin_round(versions[1])
            engine.steps_left = 10**9
            await desk.until(lambda: len(desk.done) == 2)
        await engine.close()
        return desk

    desk = play(scenario())
    cold = new_stepper(1, exact=True)
    for number, prefix in ((1, desk.partials[0]), (2, None)):
        answer = carry_on_in_parts(cold, replace(own_task(number, BUDGET), prefix=prefix), [])
        assert answer.tokens.tolist() == desk.done[number].tokens.tolist()
        assert answer.logprobs.tolist() == desk.done[number].logprobs.tolist()
