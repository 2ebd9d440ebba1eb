"""What the engines that run as servers of their own have in common, however each of them says it.

A dialect speaks one server's HTTP API and knows its traps; it keeps no state but what the server told. Who may ask what
when, what becomes of running requests at a load, and which version a token came from is `engine`'s affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.rollout.engine import Finish, KvMode
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version


@dataclass(frozen=True)
class Facts:
    """What a server said about itself when it was first asked."""

    name: str
    """Engine and version, such as `vllm 0.32.0`."""
    dtype: str
    max_context_tokens: int
    has_spans: bool
    """Whether answers tell which tokens came from which weights."""
    has_labels: bool
    """Whether the server can be told, and asked, what its weights are called."""
    kv_modes: frozenset[KvMode]
    is_seeded: bool = True
    """Whether a call's seed counts."""
    quantisation: str = ""
    is_tempered: bool = True
    """Whether log-probs are those after temperature."""

    @property
    def fingerprint(self) -> str:
        return " ".join(word for word in (self.name, self.dtype, self.quantisation) if word)


@dataclass(frozen=True)
class Call:
    """One request as it is sent; what is carried on after a load is another one."""

    id: str
    """Never used before on this server."""
    tokens: Sequence[int]
    seed: int
    sampling: Sampling
    salt: str
    """Prefixes are shared with calls of the same salt alone."""
    label: str = ""
    """What the weights are called that are to answer it."""


@dataclass(frozen=True)
class Span:
    """Tokens of an answer, from `start` up to `end`, that were sampled while the weights were called `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """A part of an answer as it comes in."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish | None = None
    """Says that this was the last."""
    spans: Sequence[Span] = ()
    """Of the whole answer, with its last chunk, where the server has spans."""
    num_cached: int | None = None
    """How many of the call's tokens were not computed, because the server had their KV; where it tells."""


class Dialect(Protocol):
    """One server. Every call ends within its deadline, by an answer or by an `EngineError` that names the server:
    `ServerAway` where it gave none."""

    async def probe(self) -> Facts:
        """Learns what the server can do; refuses one that cannot be worked with, saying how to start it instead."""
        ...

    def generate(self, call: Call) -> AsyncIterator[Chunk]:
        """Sends a call and yields its answer; the last chunk has `finish`. Closing it early frees the server of it."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """Asks that calls end with what they have, by `Finish.ABORT`. One that the server does not know yet, because
        it is overtaken, is not ended by this."""
        ...

    async def pause(self, *, keeps_kv: bool) -> None:
        """Stops generation between two steps; calls stay inside. Unless kept, all keys and values are forgotten, and
        computed anew by the weights that are there when generation goes on. Returns once nothing is computed."""
        ...

    async def stage(self, version: Version) -> None:
        """Does what of a load can be done while generation goes on."""
        ...

    async def load(self, version: Version, label: str) -> None:
        """Puts a version's weights in place and calls them `label`; the server is paused, and holds no call where it
        has no spans."""
        ...

    async def resume(self) -> None: ...

    async def label(self) -> str:
        """What the weights are called now, or, for a server without labels, something that changes with its life."""
        ...

    async def check(self) -> None:
        """Returns where the server is alive and able to generate."""
        ...

    async def close(self) -> None: ...
