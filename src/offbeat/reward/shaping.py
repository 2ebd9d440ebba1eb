"""What the parts of a reward count, and what an answer loses for its length.

Pure. Weights are put on once, before a reward is stored, and are stored with it: what it came to never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from offbeat.errors import UserError
from offbeat.spelling import suggest
from offbeat.trajectory import Reward

OVERLONG = "overlong"
"""The part of a reward that says what an answer lost for its length."""


@dataclass(frozen=True)
class Shaping:
    """How a run turns what rewards say into what is stored."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """By the name of a part; parts that are not named count 1."""
    max_new_tokens: int = 0
    overlong_tokens: int = 0
    """Answers that come this close to `max_new_tokens` lose reward; 0: none does."""
    overlong_penalty: float = 1.0

    def weighted(self, rewards: Sequence[Reward]) -> tuple[Reward, ...]:
        """The rewards with their weights."""
        if not self.weights:
            return tuple(rewards)
        return tuple(msgspec.structs.replace(r, weight=float(self.weights.get(r.name, 1.0))) for r in rewards)

    def for_training(self, rewards: Sequence[Reward], num_tokens: int) -> tuple[Reward, ...]:
        """The rewards with their weights, and what the answer loses for its length as one more part."""
        if not self.overlong_tokens:
            return self.weighted(rewards)
        lost = penalty(num_tokens, self.max_new_tokens, self.overlong_tokens, self.overlong_penalty)
        return *self.weighted(rewards), Reward(lost, OVERLONG)

    def check_names(self, names: Collection[str]) -> None:
        """Refuses weights of parts that no reward gives, and parts that mean something else here; `names` are those
        that rewards gave when they were tried."""
        for name, weight in self.weights.items():
            if name not in names:
                raise UserError(
                    f"reward.weights.{name} = {weight:g}: no reward gave a part of that name when it was tried; "
                    f"{suggest(name, sorted(names))}"
                )
        if self.overlong_tokens and OVERLONG in names:
            raise UserError(
                f"reward.overlong_tokens = {self.overlong_tokens}: a reward gives a part named {OVERLONG!r} itself; "
                "rename that part, or set reward.overlong_tokens = 0"
            )


def penalty(num_tokens: int, max_new_tokens: int, overlong_tokens: int, most: float) -> float:
    """What an answer of this length gains, 0 or less: nothing up to `max_new_tokens - overlong_tokens`, then less by
    the same amount for every token, down to minus `most` at `max_new_tokens`."""
    too_long = min(num_tokens - (max_new_tokens - overlong_tokens), overlong_tokens)
    return -most * (too_long / overlong_tokens) if too_long > 0 else 0.0
