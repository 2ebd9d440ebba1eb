"""How long answers get: the laws of lengths, drawn before a run and the same for every policy.

The laws have the shapes of published ones, scaled to what a tiny model can generate in minutes: a cap of 240 tokens
stands for 16,000. Each is taken twice: with half of the variance of the log-length shared by the answers to one prompt
(hard problems get long answers), and with none. A length depends on seed, prompt, epoch and member alone, so that no
order of work changes it. Engines enforce lengths; policies and their predictors never see one before it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

PROMPT_TOKENS = 16
CAP_TOKENS = 240
NUM_PROMPTS = 64
"""Prompts recur after so many groups, in another order, with new draws around the prompt's own level."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class Mode:
    """A log-normal part of a law."""

    weight: float
    median_tokens: float
    sigma: float


@dataclass(frozen=True)
class Law:
    """A mixture of log-normal lengths, cut at the cap; its modes go from short to long."""

    name: str
    modes: tuple[Mode, ...]
    shared: float = 0.0
    """Share of the variance of the underlying normal variable that a prompt's answers have in common."""
    cap_tokens: int = CAP_TOKENS

    def length(self, normal: float) -> int:
        """The length at a standard normal draw: the larger, the longer."""
        rest, share = self.modes, NORMAL.cdf(normal)
        mode = rest[0]
        for mode in rest:
            if share <= mode.weight or mode is rest[-1]:
                break
            share -= mode.weight
        within = NORMAL.inv_cdf(min(max(share / mode.weight, 1e-12), 1 - 1e-12))
        tokens = round(mode.median_tokens * float(np.exp(mode.sigma * within)))
        return min(max(tokens, 1), self.cap_tokens)


def _both(name: str, *modes: Mode) -> list[Law]:
    return [Law(f"{name}, half shared", modes, shared=0.5), Law(name, modes)]


LOG_NORMAL = [*_both("log-normal 30", Mode(1.0, 30, 1.0)), *_both("log-normal 15", Mode(1.0, 15, 1.0))]
"""The cap is 8 and 16 medians away, as it is from 2,000 and from 1,000 to 16,000."""
LIGHT = _both("light", Mode(1.0, 60, 0.1))
"""The control: nobody should gain, and nobody may lose."""
BIMODAL = _both("bimodal", Mode(0.8, 7.5, 0.3), Mode(0.2, 90, 0.3))
LAWS = [*LOG_NORMAL, *BIMODAL, *LIGHT]


class Lengths:
    """The lengths of a run: of every member of the group that a prompt makes in an epoch."""

    def __init__(self, law: Law, seed: int, group_size: int):
        self.law, self.seed, self.group_size = law, seed, group_size
        self._of_group = lru_cache(maxsize=None)(self._draw)

    def of(self, prompt: int, epoch: int, member: int) -> int:
        return self._of_group(prompt, epoch)[member]

    def _draw(self, prompt: int, epoch: int) -> list[int]:
        common = np.random.default_rng((self.seed, prompt)).normal()
        own = np.random.default_rng((self.seed, prompt, epoch)).normal(size=self.group_size)
        drawn = np.sqrt(self.law.shared) * common + np.sqrt(1 - self.law.shared) * own
        return [self.law.length(float(normal)) for normal in drawn]


def order_of(seed: int, epoch: int) -> list[int]:
    """Prompts in the order in which an epoch asks them."""
    return np.random.default_rng((seed, 10**6, epoch)).permutation(NUM_PROMPTS).tolist()
