"""Settings of a paced engine: its speed and the lengths of its answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from offbeat.errors import UserError
from offbeat.testing.paced import noise


class LengthModel(Protocol):
    """Decides how many tokens an answer has, including its stop token. The number depends only on the task's seed. So
    an unfinished answer ends at the same token, whichever worker continues it."""

    def num_tokens(self, seed: int) -> int: ...


@dataclass(frozen=True)
class FixedLength:
    """Gives all answers the same length."""

    tokens: int

    def num_tokens(self, seed: int) -> int:
        return self.tokens


@dataclass(frozen=True)
class LogNormalLength:
    """Log-normally distributed lengths, cut off at `max_tokens`; `sigma` near 1 is typical of reasoning."""

    median_tokens: float
    sigma: float
    max_tokens: int

    def num_tokens(self, seed: int) -> int:
        drawn = self.median_tokens * math.exp(self.sigma * NormalDist().inv_cdf(noise.uniform(seed)))
        return max(1, min(self.max_tokens, round(drawn)))


@dataclass(frozen=True)
class PacedSettings:
    """Settings of a paced engine.

    A decode step takes `base_s + per_row_s * rows` seconds, and a prefill `prefill_s` per token, both divided by
    `speed`.
    """

    num_slots: int = 32
    max_context_tokens: int = 8192
    vocab_size: int = 32_000
    base_s: float = 0.01
    per_row_s: float = 0.0002
    prefill_s: float = 0.0
    speed: float = 1.0
    load_s: float = 0.0
    """Seconds for which a load stops all steps, independent of `speed`."""
    lengths: LengthModel = LogNormalLength(median_tokens=256, sigma=0.8, max_tokens=8192)
    exact: bool = True
    """Value to report as `Capabilities.exact`; the engine's tokens are reproducible either way."""
    splits_by_version: bool = True
    """Whether running requests continue across a load. If not, loads are refused while requests run."""

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 1), ("max_context_tokens", 2), ("vocab_size", 2)):
            if getattr(self, name) < least:
                raise UserError(f"paced engine: {name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("base_s", "per_row_s", "prefill_s", "load_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"paced engine: {name} is {getattr(self, name)}; it must be finite and at least 0")
        if self.base_s + self.per_row_s <= 0:
            raise UserError(
                "paced engine: base_s and per_row_s are both 0, but a step must take time; set one of them above 0"
            )
        if not 0 < self.speed < math.inf:
            raise UserError(f"paced engine: speed is {self.speed}; it must be finite and above 0")

    def step_s(self, num_rows: int) -> float:
        return (self.base_s + self.per_row_s * num_rows) / self.speed

    def fill_s(self, num_tokens: int) -> float:
        return self.prefill_s * num_tokens / self.speed
