"""A request in a slot: which of its tokens which version sampled, and how old the keys and values are that it has."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offbeat.rollout.engine import Finish, Generation, KvMode, Request
from offbeat.trajectory import Segment


@dataclass
class Occupant:
    request: Request
    num_known: int
    """Tokens that were there when the slot was last filled."""
    step_offset: int
    """The index of the token that step n feeds is n plus this."""
    open_start: int
    """Where the segment begins that is being sampled."""
    kv_version: int
    """The oldest version among its keys and values."""
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Finished segments: start and end, by index into prompt + response, version and KV version."""

    @classmethod
    def of(cls, request: Request, step_offset: int, kv_version: int) -> Occupant:
        num_known = len(request.tokens)
        return cls(request, num_known, step_offset, num_known, kv_version)

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens) - self.request.position

    def may_keep_kv(self, number: int) -> bool:
        """Whether its keys and values may stay while version `number` is loaded."""
        return self.request.kv is KvMode.STALE and 0 <= number - self.kv_version <= self.request.kv_lag

    def close_span(self, end: int, version: int) -> None:
        if end > self.open_start:
            self.spans.append((self.open_start, end, version, self.kv_version))
            self.open_start = end

    def refill(self, num_known: int, step_offset: int, version: int) -> None:
        """Its keys and values are made anew by a version."""
        self.num_known, self.step_offset, self.kv_version = num_known, step_offset, version

    def generation(
        self, tokens: np.ndarray, logprobs: np.ndarray, finish: Finish, worker: str, fingerprint: str
    ) -> Generation:
        """What came of it, given the tokens and log-probs of its whole slot."""
        segments = tuple(
            Segment(
                start=start - self.num_prompt,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                kv_version=kv_version,
                worker=worker,
                engine=fingerprint,
            )
            for start, end, version, kv_version in self.spans
        )
        return Generation(self.request.id, segments, finish)
