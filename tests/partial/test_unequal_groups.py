"""Bug class 5: groups of unequal size, as failures and gates leave them, are judged over the batch or by position."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_coordinator import a_task

from offbeat.ledger.records import Batch, BatchGroup, Member
from offbeat.trainer.advantages import ADVANTAGES, credit
from offbeat.trainer.packing import samples_of
from offbeat.trajectory import End, Segment

SIZES = {7: 1, 3: 3, 11: 8}


def member(task: int, reward: float, num_tokens: int) -> Member:
    """An answer that was cut in the middle, where it has a middle."""
    trajectory = a_task(task, 40).new_trajectory()
    for start, end, version in ((0, num_tokens // 2, 0), (num_tokens // 2, num_tokens, 1)):
        if end > start:
            count = end - start
            trajectory.append(
                Segment(start, np.ones(count), logprobs=np.full(count, -1.0), version=version, kv_version=version)
            )
    trajectory.finish(End.LENGTH)
    return Member(task, 0, trajectory, (), reward, np.zeros(num_tokens, int))


def judged_alone(name: str, rewards: list[float], i: int) -> float:
    """An answer's advantage from the rewards of its own group, by the definition."""
    if len(rewards) < 2:
        return 0.0
    mean, rest = np.mean(rewards), (sum(rewards) - rewards[i]) / (len(rewards) - 1)
    return {
        "group": lambda: (rewards[i] - mean) / (np.std(rewards, ddof=1) + 1e-6),
        "mean": lambda: rewards[i] - mean,
        "leave_one_out": lambda: rewards[i] - rest,
    }[name]()


@pytest.mark.parametrize("name", ["group", "mean", "leave_one_out"])
@pytest.mark.parametrize("seed", range(4))
def test_groups_of_one_three_and_eight_in_any_order_are_each_judged_alone(name, seed):
    rng = random.Random(seed)
    rewards = {group: [round(rng.gauss(group, 1 + group), 3) for _ in range(size)] for group, size in SIZES.items()}
    lengths = {group: [rng.randint(1, 40) for _ in range(size)] for group, size in SIZES.items()}
    found: dict[tuple[int, int], np.ndarray] = {}
    order = rng.sample(list(SIZES), len(SIZES))
    places = {group: rng.sample(range(SIZES[group]), SIZES[group]) for group in order}
    batch = Batch(
        0,
        1,
        tuple(
            BatchGroup(
                group, group, "sums", tuple(member(i, rewards[group][i], lengths[group][i]) for i in places[group])
            )
            for group in order
        ),
    )
    samples = samples_of(batch)
    given = credit(samples, ADVANTAGES[name], None, [None] * len(samples)).advantages
    for (group, i), advantages in zip([(g, i) for g in order for i in places[g]], given, strict=True):
        found[group, i] = advantages
    for group, of_group in rewards.items():
        for i in range(len(of_group)):
            assert found[group, i].shape == (lengths[group][i],)
            np.testing.assert_allclose(found[group, i], judged_alone(name, of_group, i), rtol=1e-4, atol=1e-5)
