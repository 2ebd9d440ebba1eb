"""What a worker asks of an engine, whichever engine it is.

The protocol is asynchronous and request-driven, because engines behind HTTP are: requests come and go on their own,
weights may change under them, and how steps are taken is the engine's own affair. Every engine promises:

- token ids in, token ids out; log-probs are float32, of the version that sampled the token, after temperature;
- each token is stamped with the version that sampled it: a `load` in flight splits the generation into segments;
- `abort` makes `generate` return what was sampled so far, with `Finish.ABORT`;
- the noise of a token is a function of the request's seed and the token's position in the response, or, where an engine
  takes only one seed per request, of `Request.engine_seed`; where it takes none (`Capabilities.is_seeded`), its own. A
  continuation never replays its prefix's noise;
- after `load` returns, no token is sampled from older weights and no KV of older weights is reused, unless the request
  asked for that; a mode that an engine cannot do is refused;
- `figures` tell what it has done, and None of what it cannot know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.trajectory import Sampling, Segment
from offbeat.weights.version import Version

__all__ = [
    "Capabilities",
    "Engine",
    "EngineDied",
    "EngineError",
    "EngineFigures",
    "Finish",
    "Generation",
    "KvMode",
    "Request",
    "Version",
    "problem_of",
]


class EngineError(OffbeatError):
    """An engine could not do what was asked; the message names the engine."""


class EngineDied(EngineError):
    """The engine itself is gone: nothing that is asked of it will be done any more."""


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Someone asked for it, or the engine is closing; the tokens so far are good."""
    TURN = "turn"
    """The model handed the word to its environment."""


class KvMode(StrEnum):
    """What a request's tokens may attend to: keys and values that were computed when."""

    SAME = "same"
    """By the version that samples; where the engine holds a prefix already, as that of a request which was cut, it is
    not computed again."""
    REFILL = "refill"
    """By this very request: nothing that another left behind is used."""
    STALE = "stale"
    """As `SAME`, but what a request has is kept across a load, while `Request.kv_lag` allows: where it runs, and, in an
    engine that is able to, where it was cut before and is carried on after."""


@dataclass(frozen=True)
class Request:
    """One generation: `tokens` are the prompt and, from `position` > 0 on, the response so far."""

    id: str
    tokens: np.ndarray
    seed: int
    sampling: Sampling
    position: int = 0
    """Response position of the first token to sample; `sampling.max_new_tokens` counts from here."""
    kv: KvMode = KvMode.SAME
    kv_lag: int = 0
    """How many versions kept keys and values may lag behind (`KvMode.STALE`)."""

    @property
    def engine_seed(self) -> int:
        """A seed for engines that take one per request; other for every continuation of the same task."""
        digest = blake3(f"{self.seed}:{self.position}".encode()).digest(length=4)
        return int.from_bytes(digest, "little") & 0x7FFFFFFF


@dataclass(frozen=True)
class Generation:
    """What came of a request: segments that start at the request's position, in order, without a gap."""

    id: str
    segments: tuple[Segment, ...]
    finish: Finish


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, read once when a worker starts."""

    fingerprint: str
    """Engine, its version, dtype and quantisation; stamped on every segment."""
    num_slots: int
    """How many requests it can run at a time."""
    max_context_tokens: int
    splits_by_version: bool
    """Whether a generation in flight survives a load, split into segments."""
    kv_modes: frozenset[KvMode] = frozenset({KvMode.SAME, KvMode.REFILL})
    is_seeded: bool = True
    """Whether the same request brings the same noise."""
    exact: bool = False
    """Whether a token depends on weights, prompt and seed alone, to the bit."""


@dataclass(frozen=True)
class EngineFigures:
    """What an engine has done since it started: sums that only grow, each None in an engine that cannot know it."""

    num_steps: int | None = 0
    num_rows: int | None = 0
    """Rows of these steps: requests that took part, and whatever else ran along with them."""
    num_context_tokens: int | None = 0
    """Context that these rows read: an engine that pads reads its longest in every row."""
    num_prefilled_tokens: int | None = 0
    """Computed before a step that samples, padding included."""
    num_resumed_tokens: int | None = 0
    """Prefix tokens that needed no prefill, because their keys and values were there: a cut request's, a sibling's."""
    busy_seconds: float | None = 0.0
    """Spent on steps and prefills."""

    def __add__(self, other: EngineFigures) -> EngineFigures:
        return EngineFigures(
            _sum(self.num_steps, other.num_steps),
            _sum(self.num_rows, other.num_rows),
            _sum(self.num_context_tokens, other.num_context_tokens),
            _sum(self.num_prefilled_tokens, other.num_prefilled_tokens),
            _sum(self.num_resumed_tokens, other.num_resumed_tokens),
            _sum(self.busy_seconds, other.busy_seconds),
        )


Number = TypeVar("Number", int, float)


def _sum(mine: Number | None, more: Number | None) -> Number | None:
    return None if mine is None or more is None else mine + more


class Engine(Protocol):
    """See the module's promises."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int | None:
        """The number of the version that is served; None before the first load."""
        ...

    @property
    def seconds_still(self) -> float:
        """How long generation has stood still for loads, all of them together."""
        ...

    @property
    def figures(self) -> EngineFigures: ...

    async def generate(self, request: Request) -> Generation: ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """Ends the named requests, or all of them, returning once none of them runs any more."""
        ...

    async def load(self, version: Version) -> None:
        """Puts a version's weights in place between two steps; requests in flight go on under it."""
        ...

    async def close(self) -> None: ...


def problem_of(request: Request, version: int | None, capabilities: Capabilities) -> str | None:
    """Why an engine that serves `version` cannot run a request; None where it can."""
    sampling, num_tokens, max_context_tokens = request.sampling, len(request.tokens), capabilities.max_context_tokens
    if version is None:
        return "no version is loaded yet; call load first"
    if not 0 <= request.position < num_tokens:
        return f"{num_tokens} tokens with {request.position} of them sampled before: the prompt is empty"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens = {sampling.max_new_tokens}: allowed 1 or more"
    if num_tokens + sampling.max_new_tokens > max_context_tokens:
        return (
            f"{num_tokens} tokens and max_new_tokens = {sampling.max_new_tokens} need "
            f"{num_tokens + sampling.max_new_tokens} of the context's {max_context_tokens} tokens"
        )
    if request.kv not in capabilities.kv_modes:
        allowed = ", ".join(sorted(capabilities.kv_modes))
        return f"kv = {request.kv.value}: {capabilities.fingerprint} can do {allowed}"
    return None
