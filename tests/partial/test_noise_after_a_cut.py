"""Bug class 14: the noise of a continuation is that of its beginning once more.

Where every token is equally likely noise alone chooses, and noise that is drawn twice shows as tokens drawn twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_coordinator import a_task
from partial_scenes import VOCAB_SIZE, handed_on, new_stepper

from offbeat.engines.embedded.stepper import Stepper
from offbeat.trajectory import Segment, Task
from offbeat.worker.worker import append, begin, request_for

BUDGET = 16
HALF = BUDGET // 2
NUM_SEEDS = 320


@pytest.fixture(scope="module", params=[False, True], ids=["quick", "exact"])
def flat(request) -> Stepper:
    stepper = new_stepper(num_slots=64, exact=request.param)
    with torch.inference_mode():
        stepper.model.lm_head.weight.zero_()
    return stepper


def carry_on_together(stepper: Stepper, tasks: Sequence[Task], num_steps: int) -> list[Task]:
    """Many at a time, for so many steps; as their next workers get them."""
    by_id = {running.request_id: running for running in map(begin, tasks)}
    with torch.inference_mode():
        for running in by_id.values():
            stepper.submit(request_for(running))
        ended = [generation for _ in range(num_steps) for generation in stepper.step()]
        for generation in (*ended, *stepper.abort(None)):
            append(by_id[generation.id].trajectory, generation)
    return [handed_on(running.task, running) for running in by_id.values()]


def test_cut_anywhere_an_answer_goes_on_with_the_noise_of_its_own_positions(flat):
    tasks = [a_task(number, BUDGET) for number in range(8)]
    whole = [task.prefix.tokens.tolist() for task in carry_on_together(flat, tasks, BUDGET)]
    assert {len(tokens) for tokens in whole} == {BUDGET}
    for at in range(1, BUDGET):
        found = carry_on_together(flat, carry_on_together(flat, tasks, at), BUDGET)
        assert [task.prefix.tokens.tolist() for task in found] == whole


def test_a_continuation_tells_nothing_of_its_beginning_nor_of_another_answers(flat):
    """Over many answers, each cut in the middle: tokens as far from the start as from the cut are alike by chance only,
    those of neighbouring seeds too, and continuations are as evenly spread as chance makes them."""
    tasks = [a_task(seed, BUDGET) for seed in range(NUM_SEEDS)]
    done = [
        task
        for first in range(0, NUM_SEEDS, 64)
        for task in carry_on_together(flat, carry_on_together(flat, tasks[first : first + 64], HALF), HALF + 1)
    ]
    tokens = np.array([task.prefix.tokens for task in done])
    first, second = tokens[:, :HALF], tokens[:, HALF:]
    by_chance = first.size / VOCAB_SIZE
    limit = by_chance + 6 * by_chance**0.5
    assert (first == second).sum() < limit
    assert (first[1:] == second[:-1]).sum() < limit
    counts = np.bincount(second.ravel(), minlength=VOCAB_SIZE)
    expected = second.size / VOCAB_SIZE
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - VOCAB_SIZE) < 6 * (2 * VOCAB_SIZE) ** 0.5
    correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
    assert abs(correlation) < 5 / first.size**0.5


def test_an_engine_that_takes_one_seed_a_request_gets_another_for_every_continuation():
    seeds = set()
    for number in range(20):
        running = begin(a_task(number, BUDGET))
        for at in range(BUDGET):
            seeds.add(request_for(running).engine_seed)
            running.trajectory.append(Segment(at, [1], logprobs=[-1.0], version=0, kv_version=0))
    assert len(seeds) == 20 * BUDGET
