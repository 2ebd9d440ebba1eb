"""How fast a paced engine is, and how long its answers are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from offbeat.errors import UserError
from offbeat.rollout.engines.paced import noise


class LengthModel(Protocol):
    """How many tokens an answer has before its stop token, counting it: a function of the task's seed alone, so that
    whoever carries a partial on ends it at the same place."""

    def num_tokens(self, seed: int) -> int: ...


@dataclass(frozen=True)
class FixedLength:
    """Every answer is as long."""

    tokens: int

    def num_tokens(self, seed: int) -> int:
        return self.tokens


@dataclass(frozen=True)
class LogNormalLength:
    """Half of the answers are longer than the median, and some much longer: `sigma` near 1 is what reasoning shows."""

    median_tokens: float
    sigma: float
    max_tokens: int

    def num_tokens(self, seed: int) -> int:
        drawn = self.median_tokens * math.exp(self.sigma * NormalDist().inv_cdf(noise.uniform(seed)))
        return max(1, min(self.max_tokens, round(drawn)))


@dataclass(frozen=True)
class PacedSettings:
    """A decode step takes `base_s + per_row_s * rows`, and `prefill_s` for each token that is fed before it: a new
    request's, unless they are held since it was cut, and after a load those of all that run. All of that is divided by
    `speed`."""

    num_slots: int = 32
    max_context_tokens: int = 8192
    vocab_size: int = 32_000
    base_s: float = 0.01
    per_row_s: float = 0.0002
    prefill_s: float = 0.0
    speed: float = 1.0
    load_s: float = 0.0
    """How long a load stops all steps; a matter of links and memory, so `speed` has no part in it."""
    lengths: LengthModel = LogNormalLength(median_tokens=256, sigma=0.8, max_tokens=8192)
    exact: bool = True
    """A paced engine always is; without it, it says otherwise."""
    splits_by_version: bool = True
    """Without it a load is refused while requests run, as by engines that cannot change weights under them."""

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 1), ("max_context_tokens", 2), ("vocab_size", 2)):
            if getattr(self, name) < least:
                raise UserError(f"paced engine: {name} = {getattr(self, name)}: allowed {least} or more")
        for name in ("base_s", "per_row_s", "prefill_s", "load_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"paced engine: {name} = {getattr(self, name)}: allowed 0 or more")
        if self.base_s + self.per_row_s <= 0:
            raise UserError("paced engine: base_s = per_row_s = 0: a step must take time; raise one of them")
        if not 0 < self.speed < math.inf:
            raise UserError(f"paced engine: speed = {self.speed}: allowed above 0")

    def step_s(self, num_rows: int) -> float:
        return (self.base_s + self.per_row_s * num_rows) / self.speed

    def fill_s(self, num_tokens: int) -> float:
        return self.prefill_s * num_tokens / self.speed
