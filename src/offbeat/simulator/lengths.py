"""Lengths of answers: by a law, a histogram or observed lengths, alike within a group as far as told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 1024
"""Groups whose lengths are drawn at a time."""


class Law(Protocol):
    def of(self, normal: np.ndarray) -> np.ndarray:
        """Returns lengths for standard normal draws: the larger, the longer."""
        ...


@dataclass(frozen=True)
class LogNormal:
    median: float
    sigma: float
    longest: int

    def of(self, normal: np.ndarray) -> np.ndarray:
        return np.minimum(self.median * np.exp(self.sigma * normal), self.longest)


@dataclass(frozen=True)
class Quantiles:
    """A law given by its quantiles: lengths at equally spaced shares from 0 to 1."""

    values: tuple[float, ...]

    def of(self, normal: np.ndarray) -> np.ndarray:
        shares = np.linspace(0.0, 1.0, len(self.values))
        return np.interp(_share(normal), shares, self.values)


def of_histogram(edges: Sequence[float], counts: Sequence[float]) -> Quantiles:
    """A law whose lengths are uniform within each bin."""
    shares = np.concatenate([[0.0], np.cumsum(np.asarray(counts, float))]) / float(np.sum(counts))
    return Quantiles(tuple(np.interp(np.linspace(0, 1, 4097), shares, np.asarray(edges, float)).tolist()))


def of_samples(lengths: Sequence[int]) -> Quantiles:
    return Quantiles(tuple(float(length) for length in sorted(lengths)))


def constant(num_tokens: float) -> Quantiles:
    return Quantiles((float(num_tokens), float(num_tokens)))


def _share(normal: np.ndarray) -> np.ndarray:
    """Returns the share of a standard normal variable's values below each of `normal`."""
    from math import erf, sqrt

    return 0.5 * (1.0 + np.vectorize(erf)(normal / sqrt(2.0)))


class Lengths:
    """Draws the lengths of groups, in the order of their ordinals. `shared` is the share of the variance that the
    answers to one prompt have in common. `no_signal` is the share of groups with equal rewards."""

    def __init__(
        self,
        answer: Law,
        group_size: int,
        *,
        prompt: Law,
        longest: int,
        shared: float = 0.0,
        no_signal: float = 0.0,
        seed: int = 0,
    ):
        self._answer, self._prompt, self.group_size, self._longest = answer, prompt, group_size, longest
        self._shared, self._no_signal = shared, no_signal
        self._random = np.random.Generator(np.random.Philox(seed))
        self._block: list[tuple[list[int], int, float]] = []

    def draw(self) -> tuple[list[int], int, float]:
        """Returns the answer lengths of a group, its prompt's length, and the spread of its rewards."""
        if not self._block:
            self._block = self._draw_block()
        return self._block.pop()

    def _draw_block(self) -> list[tuple[list[int], int, float]]:
        common = self._random.standard_normal((BLOCK, 1))
        own = self._random.standard_normal((BLOCK, self.group_size))
        normal = np.sqrt(self._shared) * common + np.sqrt(1.0 - self._shared) * own
        answers = np.clip(np.rint(self._answer.of(normal)), 1, self._longest).astype(int).tolist()
        prompts = np.maximum(np.rint(self._prompt.of(self._random.standard_normal(BLOCK))), 1).astype(int).tolist()
        spreads = (self._random.random(BLOCK) >= self._no_signal).astype(float).tolist()
        return list(zip(answers, prompts, spreads, strict=True))[::-1]


class GivenLengths(Lengths):
    """Lengths of a finished run's groups, in their order; after the last, they begin again from the first."""

    def __init__(self, groups: Sequence[tuple[Sequence[int], int]]):
        self._groups = [(list(lengths), prompt, 1.0) for lengths, prompt in groups]
        self._next = 0
        self.group_size = len(self._groups[0][0])

    def draw(self) -> tuple[list[int], int, float]:
        found = self._groups[self._next % len(self._groups)]
        self._next += 1
        return found
