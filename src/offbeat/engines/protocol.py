"""The protocol between a worker and its engine.

Requests come and go on their own, weights may change under them, and the engine decides how to take steps. Every engine
promises:

- Token ids in, token ids out. Log-probs are float32, of the version that sampled the token, after temperature.
- Each token carries the version that sampled it: a `load` splits running generations into segments.
- `abort` makes `generate` return the tokens so far, with `Finish.ABORT`.
- The noise of a token depends on the request's seed and the token's response position. An engine that takes one seed
  per request uses `Request.engine_seed`; one that takes none says so (`Capabilities.is_seeded`). A continuation never
  replays its prefix's noise.
- After `load` returns, no token is sampled from older weights, and no KV of older weights is reused unless the request
  allows it. An unsupported KV mode is refused.
- `metrics` count the engine's work; a value that it cannot know is None.
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
    """An engine could not do what was asked; the message names it."""


class EngineDied(EngineError):
    """The engine is dead: every further call fails."""


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """By `abort`, or because the engine is closing; the tokens so far are good."""
    TURN = "turn"
    """The model's turn ended; its environment is next."""


class KvMode(StrEnum):
    """Keys and values that a request's tokens may attend to."""

    SAME = "same"
    """Those of the version that samples; a cached prefix, as of an aborted request, may be reused."""
    REFILL = "refill"
    """Those computed for this very request."""
    STALE = "stale"
    """As `SAME`, but a request keeps its keys and values across a load while `Request.kv_lag` allows: while it runs,
    and, if the engine can, when it was aborted before and is resumed after."""


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
    """Versions that kept keys and values may lag behind (`KvMode.STALE`)."""

    @property
    def engine_seed(self) -> int:
        """Seed for engines that take one per request; differs for every continuation of a task."""
        digest = blake3(f"{self.seed}:{self.position}".encode()).digest(length=4)
        return int.from_bytes(digest, "little") & 0x7FFFFFFF


@dataclass(frozen=True)
class Generation:
    """Result of a request: consecutive segments that start at the request's position."""

    id: str
    segments: tuple[Segment, ...]
    finish: Finish


@dataclass(frozen=True)
class Capabilities:
    """Abilities and limits of an engine; they never change."""

    fingerprint: str
    """Engine, its version, dtype and quantisation; stamped on every segment."""
    num_slots: int
    """Concurrent requests."""
    max_context_tokens: int
    splits_by_version: bool
    """Whether a running generation survives a load, split into segments."""
    kv_modes: frozenset[KvMode] = frozenset({KvMode.SAME, KvMode.REFILL})
    is_seeded: bool = True
    """Whether the same request gets the same noise."""
    exact: bool = False
    """Whether a token depends on weights, prompt and seed alone, to the bit."""


@dataclass(frozen=True)
class EngineMetrics:
    """Work of an engine since its start, in sums that only grow; None: unknown to this engine."""

    num_steps: int | None = 0
    num_rows: int | None = 0
    """Rows of all steps: one per running request, and padding rows."""
    num_context_tokens: int | None = 0
    """Context tokens read by these rows, padding included."""
    num_prefilled_tokens: int | None = 0
    """Tokens computed in prefills, padding included."""
    num_resumed_tokens: int | None = 0
    """Prefix tokens that needed no prefill because their keys and values were cached."""
    busy_seconds: float | None = 0.0
    """Time spent on steps and prefills."""

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return EngineMetrics(*(None if mine is None or more is None else mine + more for mine, more in pairs))


class Engine(Protocol):
    """An engine that keeps the promises of this module."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int | None:
        """Number of the version served; None before the first load."""
        ...

    @property
    def seconds_still(self) -> float:
        """Total time for which loads have stopped generation."""
        ...

    @property
    def metrics(self) -> EngineMetrics: ...

    async def generate(self, request: Request) -> Generation: ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """Ends the named requests, or all; returns once none of them runs."""
        ...

    async def load(self, version: Version) -> None:
        """Loads a version's weights between two steps; running requests continue with it."""
        ...

    async def close(self) -> None: ...


def problem_of(request: Request, version: int | None, capabilities: Capabilities) -> str | None:
    """Why an engine that serves `version` cannot run a request; None if it can."""
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
