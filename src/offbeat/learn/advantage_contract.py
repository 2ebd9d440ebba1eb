"""The contract of an advantage: what training relies on in a function from rewards and groups to advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from offbeat.learn.contract import Broke, Check, Finding, Mark, run_checks

GROUPS = np.array([7, 3, 7, 11, 3, 7, 5, 11, 3, 7])
"""Of unequal sizes, mixed, and one of a single answer."""
REWARDS = np.array([1.0, 0.0, 0.25, 0.5, 1.0, 0.0, 0.7, -0.5, 0.3, 0.1])
EQUAL = (0.0, 0.1, 1 / 3, 1e6 + 0.1)
"""Rewards whose mean, rounded, need not be themselves."""
CLOSE = 1e-5

Function = Callable[[np.ndarray, np.ndarray], Any]


def check_advantage(advantage: Function) -> Iterator[Finding]:
    return run_checks(_Trial(advantage).checks())


class _Trial:
    def __init__(self, advantage: Function):
        self.advantage = advantage
        self.whole = np.zeros(0)
        """Of all answers, once the first check has held."""

    def checks(self) -> list[Check]:
        return [
            ("returns one finite number per answer", self.returns_numbers),
            ("the same input gives the same result", self.repeats),
            ("leaves its input as it was", self.changes_nothing),
            ("the order of answers does not matter", self.ignores_order),
            ("group ids are labels", self.ignores_labels),
            ("groups have no influence on each other", self.is_by_group),
            ("where all rewards are equal there is no advantage", self.needs_differences),
            ("a group of one is finite", self.takes_one),
            ("large rewards and small differences stay finite", self.takes_extremes),
            ("of a group, a better answer never has the lower advantage", self.keeps_order),
        ]

    def returns_numbers(self) -> None:
        self.whole = self._call(REWARDS, GROUPS)

    def repeats(self) -> None:
        if not np.array_equal(self._call(REWARDS, GROUPS), self.whole):
            raise Broke("a second call gave another: a run could not be repeated or resumed as it was")

    def changes_nothing(self) -> None:
        rewards, groups = REWARDS.copy(), GROUPS.copy()
        self.advantage(rewards, groups)
        for name, given, was in (("rewards", rewards, REWARDS), ("groups", groups, GROUPS)):
            if not np.array_equal(given, was):
                raise Broke(f"{name} was changed in place; copy it first")

    def ignores_order(self) -> None:
        order = np.random.default_rng(0).permutation(len(REWARDS))
        self._compare(self._call(REWARDS[order], GROUPS[order]), self.whole[order], "answers come in any order")

    def ignores_labels(self) -> None:
        names = {7: 900_001, 3: 12, 11: 0, 5: 44}
        found = self._call(REWARDS, np.array([names[group] for group in GROUPS]))
        self._compare(found, self.whole, "compare ids for being equal, and do nothing else with them")

    def is_by_group(self) -> None:
        for group in np.unique(GROUPS):
            own = group == GROUPS
            why = "it uses the whole batch, so batch.groups_per_step is part of it"
            self._compare(self._call(REWARDS[own], GROUPS[own]), self.whole[own], why, Mark.WARNS)

    def needs_differences(self) -> None:
        for value in EQUAL:
            for groups in (GROUPS, np.zeros_like(GROUPS)):
                found = self._call(np.full(len(groups), value), groups, f" where all rewards are {value:g}")
                if np.abs(found).max() > CLOSE:
                    raise Broke(
                        f"up to {np.abs(found).max():.4g} where all are {value:g}: nothing was better than anything; "
                        "subtract a mean, and do not divide rounding errors by each other"
                    )

    def takes_one(self) -> None:
        self._call(np.array([1.0]), np.array([4]), " for a group of one")

    def takes_extremes(self) -> None:
        for scale in (1e6, 1e-12):
            self._call(REWARDS * scale, GROUPS, f" with rewards around {scale:g}")
        close = 1e6 + 1e-9 * np.arange(len(REWARDS))
        self._call(close, GROUPS, " with rewards that hardly differ")

    def keeps_order(self) -> None:
        for group in np.unique(GROUPS):
            own = group == GROUPS
            by_reward = self.whole[own][np.argsort(REWARDS[own])]
            if np.any(np.diff(by_reward) < -CLOSE):
                told = f"rewards {np.sort(REWARDS[own])} give {by_reward.round(3)}"
                raise Broke(f"{told}; is its sign right?", Mark.WARNS)

    def _call(self, rewards: np.ndarray, groups: np.ndarray, told: str = "") -> np.ndarray:
        found = np.asarray(self.advantage(rewards.copy(), groups.copy()))
        if not np.issubdtype(found.dtype, np.number):
            raise Broke(f"returned {found.dtype}; numbers are wanted")
        if found.shape != rewards.shape:
            raise Broke(f"returned shape {found.shape} for {len(rewards)} answers{told}; one number each is wanted")
        if not np.isfinite(found).all():
            raise Broke(f"{int((~np.isfinite(found)).sum())} of {len(found)} are NaN or infinite{told}")
        return found.astype(np.float64)

    def _compare(self, found: np.ndarray, wanted: np.ndarray, why: str, mark: Mark = Mark.FAILS) -> None:
        apart = np.abs(found - wanted)
        if apart.max() > CLOSE:
            at = int(apart.argmax())
            raise Broke(f"one is {found[at]:.4g} then, and {wanted[at]:.4g} otherwise: {why}", mark)
