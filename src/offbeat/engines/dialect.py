"""`Dialect`: the common interface to engines that run as servers: HTTP servers, or vLLM in a process of ours.

A dialect speaks one server's API and knows its quirks. It remembers what the server reported and which weights it has
prepared for a load, but no requests. `server_engine` decides when to call the dialect, what happens to running requests
at a load, and which version sampled a token.
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
"""Tokens per streamed event. With fewer, the server spends more time on events than on sampling; with more, tokens
arrive late."""


@dataclass(frozen=True)
class Facts:
    """Properties of a server, as `Dialect.probe` found them."""

    name: str
    """Engine and version, such as `vllm 0.32.0`."""
    dtype: str
    max_context_tokens: int
    has_spans: bool
    """Whether answers say which weights sampled each token."""
    has_labels: bool
    """Whether the server stores a label (text that a load gives to the weights) and reports it on request."""
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
    """Arguments of one call that generates tokens. A request that a load of weights interrupts is continued by a new
    call."""

    id: str
    """Id of the call, unique on this server."""
    tokens: Sequence[int]
    seed: int
    sampling: Sampling
    salt: str
    """Any text; the server shares cached prefixes only between calls with the same salt."""
    label: str = ""
    """Label of the loaded weights that must sample the answer; see `Dialect.load`."""


class Span(msgspec.Struct, frozen=True):
    """Tokens `start` to `end` (exclusive) of a server's answer, all sampled by the weights labelled `label`."""

    label: str = msgspec.field(name="version")
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A part of a streamed answer."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    """Why the answer ended, in the last chunk; None in all others."""
    spans: Sequence[Span] = ()
    """Spans of the whole answer, in the last chunk only; always empty if the server reports no spans."""
    num_cached: int | None = None
    """Tokens of the call whose keys and values the server already had cached; None: not reported."""


class Dialect(Protocol):
    """API of one server. Every call to the server but `generate` has a deadline. A failed call raises an `EngineError`
    (`ServerAway` if the server did not answer)."""

    async def probe(self) -> Facts:
        """Returns the server's properties. For an unsuitable server, raises an error that says how to start it."""
        ...

    def generate(self, call: Call) -> AsyncIterator[Chunk]:
        """Sends a call and yields its answer; the last chunk has `finish`. Closing the iterator ends the call."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """Asks the server to end the calls with these ids, with `Finish.ABORT`. A call that has not reached the server
        yet is not ended."""
        ...

    async def pause(self, *, keeps_kv: bool) -> None:
        """Stops generation between two decode steps and returns once the server computes nothing; open calls stay open.
        If `keeps_kv` is False, the server drops all keys and values and computes them again after `resume`."""
        ...

    async def stage(self, version: Version) -> None:
        """Prepares the load of a version, such as by reading its files, while the server still generates."""
        ...

    async def load(self, version: Version, label: str) -> None:
        """Loads a version's weights and gives them `label`. The server must be paused; if its answers do not say which
        weights sampled each token, it must also have no open call."""
        ...

    async def resume(self) -> None: ...

    async def label(self) -> str:
        """Returns the label of the server's weights. If the server stores no label, returns a text that changes when
        the server restarts. The text may be constant if a restart is noticed anyway, because it breaks the
        connection."""
        ...

    async def check(self) -> None:
        """Raises an `EngineError` if the server is dead or cannot generate."""
        ...

    async def close(self) -> None: ...


def read_event(server: Server, path: str, decoder: msgspec.json.Decoder[T], event: bytes) -> T:
    """Decodes one event of a stream; raises an `EngineError` that names the server if the event is malformed."""
    try:
        return decoder.decode(event)
    except NOT_JSON as error:
        raise EngineError(f"{server.url}{path}: the server sent a malformed event: {error}: {event[:300]!r}") from error
