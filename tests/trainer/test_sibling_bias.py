"""What it costs to judge an answer by the siblings that were finished before it: those are the short ones.

The law is the plainest in which reward depends on length: lengths are independent, and the reward is the share of
answers that are shorter (so it lies between 0 and 1, and long answers are the better ones). Of `SIZE` answers the k-th
shortest then earns k / (SIZE + 1) on average. In the closed form every answer is trained the moment that it is
finished, which is the worst case; the simulated schedule stops at the batch and knows more siblings by then.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learning_samples import make_samples

from offbeat.trainer.advantages import credit, leave_one_out

SIZE, NUM_PROMPTS = 8, 3000
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
RANKS = np.arange(1, SIZE + 1)


def strict_advantages() -> np.ndarray:
    """Leave one out, by rank of length, where the whole group is known."""
    others = (SIZE * (SIZE + 1) / 2 - RANKS) / (SIZE - 1)
    return (RANKS - others) / (SIZE + 1)


def released_advantages() -> np.ndarray:
    """The same where the shorter siblings are known alone: their mean is k / 2 / (SIZE + 1), and the first has none."""
    return np.where(RANKS == 1, 0.0, RANKS / 2 / (SIZE + 1))


def simulated(rewards: np.ndarray) -> np.ndarray:
    """Mean advantages by rank; rows of `rewards` are prompts, columns their answers by length."""
    (sample,) = make_samples(np.random.default_rng(0), [(1, [1])])
    found = []
    for rank in range(SIZE):
        batch = [
            replace(sample, group=prompt, siblings=prompt, reward=row[rank], earlier=tuple(row[:rank]))
            for prompt, row in enumerate(rewards)
        ]
        given = credit(batch, leave_one_out, None, [None] * len(batch), recalls_siblings=True)
        found.append(np.mean([a[0] for a in given.advantages]))
    return np.array(found)


def lengths_earn(seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).random((NUM_PROMPTS, SIZE)), axis=1)


def test_where_long_answers_earn_more_each_is_judged_too_well_as_the_closed_form_says():
    np.testing.assert_allclose(simulated(lengths_earn(1)), released_advantages(), atol=0.02)


def test_where_length_earns_nothing_there_is_no_bias():
    shuffled = np.random.default_rng(3).permuted(lengths_earn(2), axis=1)
    np.testing.assert_allclose(simulated(shuffled), np.zeros(SIZE), atol=0.03)


PER_STEP, NUM_STEPS = 256, 50


def stopped_at_the_batch(over_provision: float) -> tuple[float, float]:
    """Mean advantages of the shorter half of all answers, against known siblings and against their batch, where so many
    times the answers of a step are under way when it begins, each goes on until it ends, and the step takes the first
    that do. Without the first and the last steps, which are not like the others."""
    rng = np.random.default_rng(6)
    lengths = np.exp(rng.standard_normal(PER_STEP * 2 * NUM_STEPS))
    rewards = np.argsort(np.argsort(lengths)) / len(lengths)
    running: list[tuple[float, int]] = []
    known: dict[int, list[int]] = {}
    by_siblings, by_batch = np.zeros(len(lengths)), np.zeros(len(lengths))
    now, started = 0.0, 0
    for _ in range(NUM_STEPS):
        while len(running) < over_provision * PER_STEP:
            heapq.heappush(running, (now + lengths[started], started))
            started += 1
        ended = [heapq.heappop(running) for _ in range(PER_STEP)]
        now, batch = ended[-1][0], [i for _, i in ended]
        for i in batch:
            known.setdefault(i // SIZE, []).append(i)
        for i in batch:
            others = [rewards[j] for j in known[i // SIZE] if j != i]
            by_siblings[i] = rewards[i] - np.mean(others) if others else 0.0
            by_batch[i] = rewards[i] - rewards[batch].mean()
    chosen = np.arange(len(lengths)) // PER_STEP
    counts = (rewards < 0.5) & (chosen >= NUM_STEPS // 5) & (chosen < NUM_STEPS * 3 // 5)
    return float(by_siblings[counts].mean()), float(by_batch[counts].mean())


def page() -> str:
    return " ".join(PAGE.read_text().split())


@pytest.mark.parametrize("over_provision", [1.25, 2])
def test_the_figures_on_the_page_for_a_schedule_that_stops_at_the_batch_are_those_of_the_simulation(over_provision):
    by_siblings, by_batch = stopped_at_the_batch(over_provision)
    said = re.search(
        rf"answers for {over_provision:g} steps in flight, (?:the shorter half has )?(-[\d.]+) (?:for `release` )?and "
        r"(-[\d.]+)",
        page(),
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(by_siblings, abs=0.006)
    assert float(said[2]) == pytest.approx(by_batch, abs=0.006)


def test_the_figures_on_the_page_for_the_worst_case_are_those_of_the_closed_form():
    half = SIZE // 2
    text = page()
    said = re.search(r"the shorter half of 8 answers has a mean advantage of \+([\d.]+) instead of -([\d.]+)", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(released_advantages()[:half].mean(), abs=0.0005)
    assert float(said[2]) == pytest.approx(-strict_advantages()[:half].mean(), abs=0.0005)
