"""`Dialect`: the common interface to engines that run as HTTP servers.

A dialect speaks one server's API and knows its quirks; its only state is what the server reported. `http_engine`
decides when to call it, what happens to running requests at a load, and which version sampled a token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from offbeat.engines.http_calls import NOT_JSON, Server
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version

T = TypeVar("T")
STREAM_TOKENS = 32
"""Tokens in one event of an answer: fewer cost the server more than the tokens do, more come late."""


@dataclass(frozen=True)
class Facts:
    """Properties of a server, from its first probe."""

    name: str
    """Engine and version, such as `vllm 0.32.0`."""
    dtype: str
    max_context_tokens: int
    has_spans: bool
    """Whether answers name the weights that sampled each token."""
    has_labels: bool
    """Whether the server's weights can be given a label, and asked for it."""
    kv_modes: frozenset[KvMode]
    is_seeded: bool = True
    """Whether a call's seed has an effect."""
    quantisation: str = ""
    is_tempered: bool = True
    """Whether log-probs are those after temperature."""

    @property
    def fingerprint(self) -> str:
        return " ".join(word for word in (self.name, self.dtype, self.quantisation) if word)


@dataclass(frozen=True)
class Call:
    """One call to the server; a request that continues after a load makes another."""

    id: str
    """Unique on this server."""
    tokens: Sequence[int]
    seed: int
    sampling: Sampling
    salt: str
    """Prefixes are shared only between calls of one salt."""
    label: str = ""
    """Label of the weights that must answer."""


class Span(msgspec.Struct, frozen=True):
    """Tokens `start` to `end` of an answer, sampled by the weights with `label`; as servers send it."""

    label: str = msgspec.field(name="version")
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    """Set in the last chunk."""
    spans: Sequence[Span] = ()
    """Spans of the whole answer, in the last chunk, if the server has spans."""
    num_cached: int | None = None
    """Tokens of the call that were not computed because the server had their KV; None: not reported."""


class Dialect(Protocol):
    """API of one server. Every call ends within its deadline, or raises an `EngineError` that names the server
    (`ServerAway`: no answer)."""

    async def probe(self) -> Facts:
        """Reads the server's properties; refuses an unsuitable server, with the way to start it instead."""
        ...

    def generate(self, call: Call) -> AsyncIterator[Chunk]:
        """Sends a call and yields its answer; the last chunk has `finish`. Closing the iterator ends the call."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """Asks the server to end calls, with `Finish.ABORT`. A call that has not reached the server yet goes on."""
        ...

    async def pause(self, *, keeps_kv: bool) -> None:
        """Stops generation between two steps; calls stay inside. Returns once nothing is computed. Unless `keeps_kv`,
        all keys and values are dropped, and computed again by the weights in place at `resume`."""
        ...

    async def stage(self, version: Version) -> None:
        """Prepares a load during generation."""
        ...

    async def load(self, version: Version, label: str) -> None:
        """Loads a version's weights and gives them `label`. The server is paused, and without spans holds no call."""
        ...

    async def resume(self) -> None: ...

    async def label(self) -> str:
        """Label of the current weights; for a server without labels, a text that changes when it restarts."""
        ...

    async def check(self) -> None:
        """Returns if the server is alive and can generate; otherwise raises."""
        ...

    async def close(self) -> None: ...


def read_event(server: Server, path: str, decoder: msgspec.json.Decoder[T], event: bytes) -> T:
    """Decodes one event of a stream; the error names the server."""
    try:
        return decoder.decode(event)
    except NOT_JSON as error:
        raise EngineError(f"{server.url}{path}: {error}: {event[:300]!r}") from error
