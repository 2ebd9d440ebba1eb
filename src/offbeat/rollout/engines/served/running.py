"""A request inside a server: what has come of it so far, and which weights and KV each token came from.

Pure: a call is begun, chunks come in, loads pass over it, it ends; what came of it then is cut into segments. A request
may take several calls, one after the other: where a server cannot tell which tokens came from which weights, none is
inside while they change, and what was running is carried on by a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from offbeat.rollout.engine import EngineDied, EngineError, Finish, KvMode, Request
from offbeat.rollout.engines.served.dialect import Call, Chunk, Span
from offbeat.trajectory import Segment


@dataclass(frozen=True)
class Loaded:
    """Weights as they are served: a version, and how the server calls this load of it."""

    number: int
    label: str


@dataclass(eq=False)
class Running:
    """One request on its way through a server."""

    request: Request
    worker: str
    fingerprint: str
    segments: list[Segment] = field(default_factory=list)
    is_aborted: bool = False
    """Someone wants what there is of it."""
    is_moving: bool = False
    """It leaves the server for a load, to be carried on after it."""
    num_calls: int = 0
    call: Call | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: tuple[Span, ...] = ()
    _loaded: list[Loaded] = field(default_factory=list)
    """What was served while the call was inside, in order."""
    _kv: list[int] = field(default_factory=list)
    """For each of these, the oldest version among the KV that was attended to."""

    @property
    def num_tokens(self) -> int:
        """Sampled by calls that have ended."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def over(self) -> Finish | None:
        """How it ended where nothing is left to be asked: a call may be aborted, or break off, just after its last
        token."""
        sampling = self.request.sampling
        if self.segments and self.segments[-1].tokens[-1] in sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= sampling.max_new_tokens else None

    @property
    def rest(self) -> Request:
        """What is still to be asked."""
        if not self.num_tokens:
            return self.request
        request, sampled = self.request, np.concatenate([segment.tokens for segment in self.segments])
        left = request.sampling.max_new_tokens - len(sampled)
        return replace(
            request,
            tokens=np.concatenate([request.tokens, sampled]),
            position=request.position + len(sampled),
            sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left),
        )

    def begin(self, loaded: Loaded, prefix: str) -> Call:
        """The next call, made while `loaded` is served. `prefix` tells apart the lives of workers on one server."""
        rest = self.rest
        self.num_calls += 1
        name = f"{prefix}-{rest.id}-{self.num_calls}"
        self.call = Call(
            id=name,
            tokens=rest.tokens.tolist(),
            seed=rest.engine_seed,
            sampling=rest.sampling,
            # A label is used for one load only, so that no two loads share a prefix, whatever they loaded.
            salt=f"{prefix}-{loaded.label}" if rest.kv is not KvMode.REFILL else name,
            label=loaded.label,
        )
        self._tokens, self._logprobs, self._spans = [], [], ()
        self._loaded, self._kv = [loaded], [loaded.number]
        return self.call

    def take(self, chunk: Chunk) -> None:
        if len(chunk.tokens) != len(chunk.logprobs):
            raise EngineError(f"{len(chunk.tokens)} tokens came with {len(chunk.logprobs)} log-probs")
        self._tokens.extend(chunk.tokens)
        self._logprobs.extend(chunk.logprobs)
        if chunk.spans:
            self._spans = tuple(chunk.spans)

    def may_keep_kv(self, number: int) -> bool:
        """Whether its KV may stay while version `number` is loaded. One that has not begun has none to keep, and may
        still be on its way to the server."""
        request = self.request
        return bool(self._tokens) and request.kv is KvMode.STALE and 0 <= number - self._kv[-1] <= request.kv_lag

    def load(self, loaded: Loaded, *, keeps_kv: bool) -> None:
        """Weights changed while the call was inside."""
        self._loaded.append(loaded)
        self._kv.append(min(self._kv[-1], loaded.number) if keeps_kv else loaded.number)

    def end(self, *, has_spans: bool) -> None:
        """The call is over: what it brought becomes segments. Raises where it cannot be known which weights it came
        from; then nothing of the call is taken over."""
        tokens, logprobs = np.asarray(self._tokens, np.int32), np.asarray(self._logprobs, np.float32)
        try:
            if len(tokens):
                for span in self._spans_of(len(tokens), has_spans=has_spans):
                    self.segments.append(self._segment(span, tokens, logprobs))
        finally:
            self.call = None

    def break_off(self) -> None:
        """The connection broke: what came is good where one set of weights alone was served meanwhile."""
        if len(self._loaded) == 1:
            self.end(has_spans=False)
        self.call = None

    def _spans_of(self, num_tokens: int, *, has_spans: bool) -> tuple[Span, ...]:
        if not has_spans:
            assert len(self._loaded) == 1, "no call stays inside a server without spans while weights change"
            return (Span(self._loaded[0].label, 0, num_tokens),)
        known = [loaded.label for loaded in self._loaded]
        at = 0
        for span in self._spans:
            if span.label not in known:
                raise EngineDied(f"tokens of weights called {span.label!r}, which this worker did not load")
            if span.start != at or span.end <= at:
                raise EngineError(f"the server's spans {self._spans} have a gap at token {at}")
            at = span.end
        if at != num_tokens:
            raise EngineError(f"the server's spans end at token {at} of {num_tokens}")
        return self._spans

    def _segment(self, span: Span, tokens: np.ndarray, logprobs: np.ndarray) -> Segment:
        index = next(i for i, loaded in enumerate(self._loaded) if loaded.label == span.label)
        return Segment(
            start=self.request.position + self.num_tokens,
            tokens=tokens[span.start : span.end],
            logprobs=logprobs[span.start : span.end],
            version=self._loaded[index].number,
            kv_version=self._kv[index],
            worker=self.worker,
            engine=self.fingerprint,
        )
