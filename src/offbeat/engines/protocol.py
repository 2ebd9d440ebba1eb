"""The protocol between a worker and its engine.

Requests start and end independently, and weights may change while requests run. The engine decides which requests share
a decode step. Every engine promises:

- It takes and returns token ids. A token's log-prob is float32, of the version that sampled the token, after
  temperature.
- Each token carries the version that sampled it. If weights are loaded during a generation, its tokens are split into
  one segment per version (only if `Capabilities.splits_by_version`).
- `abort` makes `generate` return the tokens so far, with `Finish.ABORT`.
- A token's sampling noise depends only on the request's seed and the token's response position, and a continuation
  never replays the noise of its prefix. An engine without seeds sets `Capabilities.is_seeded` to False.
- After `load` returns, no token is sampled from older weights, and no KV cache of older weights is reused unless the
  request allows it. A request with an unsupported KV mode is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.trajectory import Sampling, Segment
from offbeat.weights.version import Version as Version


class EngineError(OffbeatError):
    """An engine could not do what was asked."""


class EngineDied(EngineError):
    """The engine is dead: every further call fails."""


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Ended by `abort`, or because the engine is closing; the tokens so far are valid."""
    TURN = "turn"
    """The model's turn ended; the environment acts next."""


class KvMode(StrEnum):
    """Which keys and values a request's tokens may attend to."""

    SAME = "same"
    """Only keys and values of the version that samples the token. Cached ones may be reused, such as those of an
    aborted request."""
    REFILL = "refill"
    """Only keys and values of the version that samples the token, all computed for this request: no cache is reused."""
    STALE = "stale"
    """Like `SAME`, but a request that runs while newer weights are loaded keeps its keys and values if the oldest of
    them are at most `Request.kv_lag` versions older than those weights. Some engines also keep them for a request that
    was aborted before the load and is resumed after it."""


@dataclass(frozen=True)
class Request:
    """Asks for one generation. `tokens` are the prompt and the `position` response tokens that exist already."""

    id: str
    tokens: np.ndarray
    seed: int
    sampling: Sampling
    position: int = 0
    """Response position of the first token to sample; `sampling.max_new_tokens` counts from here."""
    kv: KvMode = KvMode.SAME
    kv_lag: int = 0
    """With `KvMode.STALE`: largest number of versions by which reused keys and values may be older than the loaded
    weights."""
    is_turn: bool = False
    """Whether a request that ends by a stop token will probably be followed by one that continues it."""

    @property
    def engine_seed(self) -> int:
        """Seed for engines that take one seed per request. It depends on `position`, so that a request that continues a
        response does not repeat the sampling noise of the response's beginning."""
        digest = blake3(f"{self.seed}:{self.position}".encode()).digest(length=4)
        return int.from_bytes(digest, "little") & 0x7FFFFFFF


@dataclass(frozen=True)
class Generation:
    """Result of a request: consecutive segments, each of one version; the first starts at the request's `position`."""

    id: str
    segments: tuple[Segment, ...]
    finish: Finish


@dataclass(frozen=True)
class Capabilities:
    """Abilities and limits of an engine, fixed for its lifetime."""

    fingerprint: str
    """Text that names engine, release, dtype and quantisation; stored with every segment."""
    num_slots: int
    """Maximum number of concurrent requests."""
    max_context_tokens: int
    splits_by_version: bool
    """Whether a running generation continues across a load, with one segment per version."""
    kv_modes: frozenset[KvMode] = frozenset({KvMode.SAME, KvMode.REFILL})
    is_seeded: bool = True
    """Whether seeds have an effect, so that the same request gets the same sampling noise."""
    exact: bool = False
    """Whether tokens and log-probs are bit-identical given the same weights, prompt and seed."""


@dataclass(frozen=True)
class EngineMetrics:
    """Cumulative counts of an engine's work since its start; None: this engine cannot know the value."""

    num_steps: int | None = 0
    num_rows: int | None = 0
    """Sum of the rows of all decode steps: in each step one row per running request, plus padding rows."""
    num_context_tokens: int | None = 0
    """Sum, over all decode steps, of the context tokens that the step's rows read, padding included."""
    num_prefilled_tokens: int | None = 0
    """Tokens computed in prefills, padding included."""
    num_resumed_tokens: int | None = 0
    """Prefix tokens that needed no prefill because their keys and values were cached or copied."""

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return EngineMetrics(*(None if mine is None or more is None else mine + more for mine, more in pairs))


class Engine(Protocol):
    """Interface of an engine; the module's docstring lists its promises."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int | None:
        """Number of the version whose weights the engine has; None before the first load."""
        ...

    @property
    def seconds_still(self) -> float:
        """Total time, in seconds, for which generation stood still because weights were loaded."""
        ...

    @property
    def metrics(self) -> EngineMetrics: ...

    async def generate(self, request: Request) -> Generation: ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """Ends the requests with these ids, or all requests if `ids` is None; returns once they have ended."""
        ...

    async def load(self, version: Version) -> None:
        """Loads a version's weights between two decode steps; running requests continue with the new weights."""
        ...

    async def close(self) -> None: ...


def problem_of(request: Request, version: int | None, capabilities: Capabilities) -> str | None:
    """Returns why an engine that serves `version` cannot run the request; None if it can."""
    sampling, num_tokens, max_context_tokens = request.sampling, len(request.tokens), capabilities.max_context_tokens
    if version is None:
        return "no version is loaded yet; call load first"
    if request.position < 0:
        return f"position = {request.position}: must be 0 or more"
    if request.position >= num_tokens:
        return f"its prompt is empty: {request.position} of its {num_tokens} tokens belong to the response"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens = {sampling.max_new_tokens}: must be 1 or more"
    if num_tokens + sampling.max_new_tokens > max_context_tokens:
        return (
            f"its {num_tokens} tokens and max_new_tokens = {sampling.max_new_tokens} add up to "
            f"{num_tokens + sampling.max_new_tokens}, but the engine's context holds {max_context_tokens} tokens; "
            "shorten the prompt or lower max_new_tokens"
        )
    if request.kv not in capabilities.kv_modes:
        allowed = ", ".join(sorted(capabilities.kv_modes))
        return f"kv = {request.kv.value}: the engine ({capabilities.fingerprint}) supports only {allowed}"
    return None
