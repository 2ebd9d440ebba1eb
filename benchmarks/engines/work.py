"""The requests to an engine, the same for every way to it: prompts of random tokens, each with a seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from offbeat.errors import OffbeatError

MAX_SEED = 2**31


@dataclass(frozen=True)
class Batch:
    """Requests for exactly `num_tokens` tokens each, `num_at_once` of them at a time."""

    prompts: list[list[int]]
    seeds: list[int]
    num_tokens: int
    num_at_once: int

    def wire(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Done:
    """Result of a batch."""

    seconds: float
    num_tokens: int
    num_logprobs: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Batches:
    """Makes batches without common prompts, because a cached prefix would make a later batch faster."""

    def __init__(self, num_prompt_tokens: int, vocabulary: int, seed: int = 0):
        self.num_prompt_tokens, self.vocabulary = num_prompt_tokens, vocabulary
        self.random = np.random.default_rng(seed)

    def make(self, num_requests: int, num_tokens: int, num_at_once: int) -> Batch:
        prompts = [self.prompt() for _ in range(num_requests)]
        seeds = self.random.integers(0, MAX_SEED, num_requests).tolist()
        return Batch(prompts, seeds, num_tokens, num_at_once)

    def prompt(self) -> list[int]:
        tokens: list[int] = self.random.integers(1, self.vocabulary, self.num_prompt_tokens).tolist()
        return tokens


def checked(way: str, batch: Batch, done: Done) -> Done:
    """Returns the result; raises if tokens or log-probs are missing, because it would then not be comparable."""
    wanted = len(batch.prompts) * batch.num_tokens
    if (done.num_tokens, done.num_logprobs) != (wanted, wanted):
        raise OffbeatError(
            f"{way}: {done.num_tokens} tokens with {done.num_logprobs} log-probs came of {wanted} that were asked for"
        )
    return done
