"""How long tools take: laws for benchmarks and tests, fitted to what is published of real tools.

A wait is a function of law, seed, episode and turn, never of the order in which calls arrive: so two systems that are
compared wait for the same calls equally long, whichever runs them first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from blake3 import blake3

from offbeat.errors import UserError
from offbeat.spelling import suggest

LAWS: dict[str, tuple[float, float]] = {
    "coding": (0.49, 2.6),
    "search": (0.6, 0.8),
    "python": (0.04, 1.2),
    "constant": (1.0, 0.0),
}
"""Median in seconds, and standard deviation of the logarithm, by law. `coding` gives the shares of real coding
sessions: 61 % of calls take less than a second, and the 4 % that take more than a minute are most of the time."""
STANDARD = NormalDist()


@dataclass(frozen=True)
class Latency:
    """A log-normal law of waiting times. `scale` shortens all of them, and `cut_s`, which is scaled as well, is the
    longest."""

    median_s: float
    sigma: float
    scale: float = 1.0
    cut_s: float = math.inf
    seed: int = 0

    def seconds(self, episode: int, turn: int) -> float:
        """Returns how long the tool of a turn takes."""
        return self.scale * min(self._drawn_s(episode, turn), self.cut_s)

    def is_cut(self, episode: int, turn: int) -> bool:
        """Returns whether the tool of a turn would have taken longer."""
        return self._drawn_s(episode, turn) > self.cut_s

    @property
    def mean_s(self) -> float:
        """Mean of all waits, the cut ones included."""
        if self.sigma == 0:
            return self.scale * min(self.median_s, self.cut_s)
        limit = math.inf if math.isinf(self.cut_s) else math.log(self.cut_s / self.median_s) / self.sigma
        below = STANDARD.cdf(limit - self.sigma) if math.isfinite(limit) else 1.0
        mean_s = self.median_s * math.exp(self.sigma**2 / 2) * below
        over = 0.0 if math.isinf(limit) else self.cut_s * (1 - STANDARD.cdf(limit))
        return self.scale * (mean_s + over)

    def _drawn_s(self, episode: int, turn: int) -> float:
        digest = blake3(f"{self.seed}:{episode}:{turn}".encode()).digest(length=8)
        uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
        uniform = min(max(uniform, 1e-15), 1 - 1e-15)  # of 64 bits a float keeps 53
        return self.median_s * math.exp(self.sigma * STANDARD.inv_cdf(uniform))


def find_law(name: str, *, scale: float = 1.0, cut_s: float = math.inf, seed: int = 0) -> Latency:
    """Returns the law of this name."""
    if name not in LAWS:
        raise UserError(f"law = {name!r}: there is no such law of latency; {suggest(name, LAWS)}")
    return Latency(*LAWS[name], scale=scale, cut_s=cut_s, seed=seed)
