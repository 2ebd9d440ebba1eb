"""`ServerEngine`: the engine protocol over an engine in a process of its own, through its `Dialect`.

Answers are streamed, which spreads the cost of reading them over time. Weights change only while the server is paused,
and every pause is followed by a resume, even after an error. An engine is dead once its server cannot be reached, sends
no token for long, has restarted or fails during a load. It is also dead if the server has other weights than those that
the engine loaded last. Then every call, including those already waiting, raises `EngineDied` with the server's name. A
dead engine stays dead; a new one must begin with a load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from offbeat.engines.dialect import Call, Chunk, Dialect, Facts, Span
from offbeat.engines.http_calls import ServerAway, ServerRefused
from offbeat.engines.protocol import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineMetrics,
    Finish,
    Generation,
    KvMode,
    Request,
    problem_of,
)
from offbeat.rules.engine_health import Health, State
from offbeat.trajectory import Segment
from offbeat.waiting import Notifier
from offbeat.weights.version import Version

CHECK_EVERY_S = 5.0
CHECK_AGAIN_S = 0.5
"""Seconds until the next health check after one that failed, or that was skipped because of a load."""
DEAD_AFTER_S = 30.0
"""Seconds of failing health checks after which a server counts as dead; a busy machine may delay answers."""
STUCK_AFTER_S = 600.0
"""Seconds without any token, while the server has requests, after which the engine is dead."""
ABORT_WITHIN_S = 30.0
ABORTED_PAUSE_S = 2.0
MAX_BREAKS = 3
"""A request fails once this many of its calls have broken off, although the server proved healthy after each."""


class ServerEngine:
    """Implements `offbeat.engines.protocol.Engine`; create one with `attach`."""

    def __init__(self, dialect: Dialect, facts: Facts, *, worker: str, num_slots: int):
        self.dialect, self.facts, self.worker = dialect, facts, worker
        self.capabilities = Capabilities(
            fingerprint=facts.fingerprint,
            num_slots=num_slots,
            max_context_tokens=facts.max_context_tokens,
            splits_by_version=True,
            kv_modes=facts.kv_modes,
            is_seeded=facts.is_seeded,
        )
        self.seconds_still = 0.0
        self.health = Health(time.monotonic, DEAD_AFTER_S)
        self._num_rows = 0
        self._num_prefilled: int | None = 0
        self._num_resumed: int | None = 0
        self._life = uuid4().hex[:8]
        self._loaded: LoadedVersion | None = None
        self._num_loads = 0
        self._is_loading = False
        self._load_lock = asyncio.Lock()
        self._running: dict[str, ActiveRequest] = {}
        self._changes = Notifier()
        self._heard_s = time.monotonic()
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: EngineDied | None = None
        self._is_suspect = asyncio.Event()
        self._watch = asyncio.ensure_future(self._check_health())

    @classmethod
    async def attach(cls, dialect: Dialect, *, worker: str, num_slots: int) -> ServerEngine:
        """Probes a server and returns an engine for it; raises an `EngineError` if the server is unsuitable."""
        return cls(dialect, await dialect.probe(), worker=worker, num_slots=num_slots)

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded.number

    @property
    def metrics(self) -> EngineMetrics:
        return EngineMetrics(None, self._num_rows, None, self._num_prefilled, self._num_resumed)

    # Requests

    async def generate(self, request: Request) -> Generation:
        self._raise_if_ended()
        if problem := problem_of(request, self.version, self.capabilities):
            raise EngineError(f"engine {self.worker}, request {request.id}: {problem}")
        if request.id in self._running:
            raise EngineError(f"engine {self.worker}: a request with id {request.id} is already running")
        running = self._running[request.id] = ActiveRequest(request, self.worker, self.facts.fingerprint)
        carrying = asyncio.ensure_future(self._carry(running))
        try:
            ends: set[asyncio.Future[Any]] = {carrying, self._death}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not carrying.done():
                self._raise_if_ended()
            return Generation(request.id, tuple(running.segments), await carrying)
        finally:
            del self._running[request.id]
            running.call = None
            carrying.cancel()  # closes its connection, which ends the call in the server
            self._changes.notify()

    async def _carry(self, running: ActiveRequest) -> Finish:
        """Runs a request to its end, with a new call after each load or broken connection; returns why it ended."""
        num_breaks = 0
        while running.over is None:
            await self._changes.wait_for(
                lambda: running.is_aborted or (self.health.may_generate and not self._is_loading)
            )
            if running.is_aborted:
                return Finish.ABORT
            num_before = running.num_tokens
            try:
                finish = await self._send(running)
                if finish is not Finish.ABORT:
                    return finish
                if not (running.is_moving or running.is_aborted) and running.num_tokens == num_before:
                    await asyncio.sleep(ABORTED_PAUSE_S)  # a server that shuts down still answers for a moment
                    raise ServerAway("the server aborted the call, although nobody asked it to")
                running.is_moving = False
            except (ServerAway, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status < 500:
                    raise EngineError(f"engine {self.worker}, request {running.request.id}: {error}") from error
                running.break_off()
                num_breaks += 1
                self._suspect(error)
                await self._changes.wait_for(lambda: self.health.state is not State.SUSPECT)
                self._raise_if_ended()  # the health check has ended the engine if the server is dead
                if num_breaks >= MAX_BREAKS:
                    raise EngineError(f"engine {self.worker}, request {running.request.id}: {error}") from error
        return running.over

    async def _send(self, running: ActiveRequest) -> Finish:
        assert self._loaded is not None
        loaded = self._loaded
        call = running.begin(loaded, self._life)
        try:
            async with aclosing(self.dialect.generate(call)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    self._heard_s = time.monotonic()
                    self._count(running, chunk)
                    running.take(chunk)
                    if chunk.finish is not None:
                        await self._check_label(loaded)
                        running.end(has_spans=self.facts.has_spans)
                        return chunk.finish
        except EngineDied as error:
            raise self._die(str(error)) from error
        finally:
            self._changes.notify()
        raise ServerAway(f"request {running.request.id}: the server's answer ended without a finish reason")

    def _count(self, running: ActiveRequest, chunk: Chunk) -> None:
        """Adds a chunk of an answer to `metrics`. The numbers of prefilled and resumed tokens are known once the first
        token comes, and only from servers that report `num_cached`."""
        assert running.call is not None
        self._num_rows += len(chunk.tokens)
        if chunk.tokens and not running.num_sampled:
            cached = chunk.num_cached
            self._count_prefill(None if cached is None else len(running.call.tokens) - cached)
            self._num_resumed = None if cached is None or self._num_resumed is None else self._num_resumed + cached

    def _count_prefill(self, num_tokens: int | None) -> None:
        self._num_prefilled = (
            None if num_tokens is None or self._num_prefilled is None else self._num_prefilled + num_tokens
        )

    async def _check_label(self, loaded: LoadedVersion) -> None:
        """Raises `EngineDied` if the server's weights no longer have the label of `loaded`. Checks nothing if the
        server has no labels, or if its answers themselves say which weights sampled each token."""
        if self.facts.has_labels and not self.facts.has_spans and (label := await self.dialect.label()) != loaded.label:
            raise EngineDied(
                f"the server's label for its weights changed from {loaded.label!r} to {label!r}, although this worker "
                "loaded none; let no other program load weights into this server"
            )

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        self._raise_if_ended()
        chosen = self._running.values() if ids is None else [self._running[id] for id in ids if id in self._running]
        targets = list(chosen)
        for running in targets:
            running.is_aborted = True
        self._changes.notify()
        await self._empty(targets)
        await self._changes.wait_for(lambda: not any(self._running.get(r.request.id) is r for r in targets))

    async def _empty(self, targets: Sequence[ActiveRequest]) -> None:
        """Aborts the calls of `targets`, keeping their tokens so far. An abort may reach the server before the call
        that it should end, so aborts are repeated until all calls have ended."""
        deadline_s, pause_s = time.monotonic() + ABORT_WITHIN_S, 0.05
        while left := [running.call.id for running in targets if running.call is not None]:
            if time.monotonic() > deadline_s:
                raise self._die(f"{len(left)} requests did not end within {ABORT_WITHIN_S:g} s of being aborted")
            with self._deadly():
                await self.dialect.abort(left)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changes.wait_for(lambda: all(running.call is None for running in targets))
            pause_s = min(2 * pause_s, 1.0)
            self._raise_if_ended()

    # Weights

    async def load(self, version: Version) -> None:
        async with self._load_lock:
            self._raise_if_ended()
            try:
                await self.dialect.stage(version)
            except ServerAway as error:  # any other error leaves the server unchanged
                raise self._die(str(error)) from error
            self._raise_if_ended()
            async with self._still():
                await self._swap(version)

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Holds back new calls while the `with` block loads weights, and adds the block's time to `seconds_still`. If
        the block fails, ends the engine, because the server's weights are then unknown."""
        start_s = time.monotonic()
        self._is_loading = True
        try:
            with self._deadly():
                yield
        except asyncio.CancelledError:
            self._die("a load was cancelled, so the server's weights are unknown")
            raise
        finally:
            self._is_loading = False
            self._heard_s = time.monotonic()
            self.seconds_still += self._heard_s - start_s
            self._changes.notify()

    async def _swap(self, version: Version) -> None:
        self._num_loads += 1
        loaded = LoadedVersion(version.number, f"{version.number}-{self._life}-{self._num_loads}")
        inside = [running for running in self._running.values() if running.call is not None]
        keeping = [running for running in inside if self.facts.has_spans and running.may_keep_kv(version.number)]
        if keeping or not self.facts.has_spans:  # a pause drops the KV cache of all calls or of none
            leaving = [running for running in inside if running not in keeping]
            for running in leaving:
                running.is_moving = True
            await self._empty(leaving)
        try:
            await self.dialect.pause(keeps_kv=bool(keeping))
            await self.dialect.load(version, loaded.label)
            label = await self.dialect.label()
            if self.facts.has_labels and label != loaded.label:
                raise EngineDied(
                    f"this worker loaded weights under the label {loaded.label!r}, but the server then reported the "
                    f"label {label!r}; let no other program load weights into this server"
                )
            for running in inside:
                if running.call is not None:
                    running.load(loaded, keeps_kv=running in keeping)
                    if running not in keeping and running.num_sampled:
                        self._count_prefill(len(running.call.tokens) + running.num_sampled)
            self._loaded = loaded
        finally:
            await self.dialect.resume()
        if self.health.state is State.DEAD:  # a request found the server dead meanwhile
            raise EngineDied(self.health.why)
        self.health.refreshed(label)

    # Health

    async def _check_health(self) -> None:
        """Checks the server every few seconds, and at once after a failed call, but not during a load. Ends the engine
        if the server is dead, has other weights than were loaded, or sends no tokens."""
        while self._ended is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_suspect.wait(), CHECK_EVERY_S)
            if self._is_loading or self._loaded is None:
                self._is_suspect.clear()
                await asyncio.sleep(CHECK_AGAIN_S)
                continue
            before = self._loaded
            try:
                await self.dialect.check()
                label = await self.dialect.label()
            except EngineError as error:
                self._suspect(error)
            else:
                if self._is_loading or self._loaded is not before:
                    continue
                self._is_suspect.clear()
                self.health.answered(label)
            self._judge()
            self._changes.notify()
            if self._is_suspect.is_set():
                await asyncio.sleep(CHECK_AGAIN_S)

    def _suspect(self, error: EngineError) -> None:
        if isinstance(error, ServerAway) and error.is_refused:
            self.health.gone(str(error))  # nothing listens: another server at this address would have other weights
        else:
            self.health.failed(str(error))
        self._is_suspect.set()

    def _judge(self) -> None:
        if all(running.call is None for running in self._running.values()):
            self._heard_s = time.monotonic()
        quiet_s = time.monotonic() - self._heard_s
        if self.health.state is State.DEAD:
            self._die(f"it is dead: {self.health.why}")
        elif self.health.state is State.STALE:
            self._die(f"its weights are not those loaded last: {self.health.why}")
        elif quiet_s > STUCK_AFTER_S:
            self._die(f"it sent no token for {quiet_s:.0f} s, although it has requests")

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """Ends the engine if the `with` block raises an `EngineError`, because the server's state is then unknown."""
        try:
            yield
        except EngineError as error:
            raise self._die(str(error)) from error

    def _die(self, why: str) -> EngineDied:
        if self._ended is None:
            self._ended = EngineDied(f"engine {self.worker} ({self.facts.name}): {why}")
            if not self._death.done():
                self._death.set_result(None)
            self._changes.notify()
        return self._ended

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def close(self) -> None:
        """Aborts all requests and leaves the server running; a second call does nothing."""
        if self._ended is None:
            with suppress(EngineError):
                await self.abort()
            self._die("it is closed")
        self._watch.cancel()
        await asyncio.wait({self._watch})
        await self.dialect.close()


@dataclass(frozen=True)
class LoadedVersion:
    """A load of a version into the server: the version's number, and the label that the server's weights got. Each load
    has a new label, even if it repeats a version."""

    number: int
    label: str


@dataclass(eq=False)
class ActiveRequest:
    """A request and its tokens so far, with the versions that sampled them and computed their keys and values. No I/O.

    A request may take several calls: if a load of weights or a broken connection ends a call, a new call continues the
    request.
    """

    request: Request
    worker: str
    fingerprint: str
    segments: list[Segment] = field(default_factory=list)
    is_aborted: bool = False
    """Whether the caller aborted the request, which then ends with the tokens so far."""
    is_moving: bool = False
    """Whether the current call is aborted because of a load; a new call continues the request after the load."""
    num_calls: int = 0
    call: Call | None = None
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: tuple[Span, ...] = ()
    _loaded: list[LoadedVersion] = field(default_factory=list)
    """Weights that the server had during the current call, in order."""
    _kv: list[int] = field(default_factory=list)
    """For each entry of `_loaded`: the oldest version that computed any keys and values that the call used with these
    weights."""

    @property
    def _label(self) -> str:
        return f"engine {self.worker}, request {self.request.id}"

    @property
    def num_sampled(self) -> int:
        """Number of tokens that have come from the current call."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens from calls that have ended, without those of the current call."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def over(self) -> Finish | None:
        """Finish reason if the tokens from ended calls complete the request; None if it needs more tokens. Even a call
        that was aborted or broken off may have sent the last token."""
        sampling = self.request.sampling
        if self.segments and self.segments[-1].tokens[-1] in sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= sampling.max_new_tokens else None

    @property
    def rest(self) -> Request:
        """Request to send next: its input includes the tokens from ended calls, and it asks only for those still
        missing."""
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

    def begin(self, loaded: LoadedVersion, prefix: str) -> Call:
        """Begins the request's next call and returns it. The caller must send it while the server has the weights
        `loaded`. The call's id begins with `prefix`, which no other engine uses on this server."""
        rest = self.rest
        self.num_calls += 1
        name = f"{prefix}-{rest.id}-{self.num_calls}"
        self.call = Call(
            id=name,
            tokens=rest.tokens.tolist(),
            seed=rest.engine_seed,
            sampling=rest.sampling,
            # A label is used for one load only, so no two loads share a prefix.
            salt=f"{prefix}-{loaded.label}" if rest.kv is not KvMode.REFILL else name,
            label=loaded.label,
        )
        self._tokens, self._logprobs, self._spans = [], [], ()
        self._loaded, self._kv = [loaded], [loaded.number]
        return self.call

    def take(self, chunk: Chunk) -> None:
        if len(chunk.tokens) != len(chunk.logprobs):
            raise EngineError(
                f"{self._label}: the server sent {len(chunk.tokens)} tokens but {len(chunk.logprobs)} log-probs"
            )
        self._tokens.extend(chunk.tokens)
        self._logprobs.extend(chunk.logprobs)
        if chunk.spans:
            self._spans = tuple(chunk.spans)

    def may_keep_kv(self, number: int) -> bool:
        """Whether the request allows the current call to keep its keys and values when version `number` is loaded.
        False before the call's first token, because the call may not have reached the server yet."""
        request = self.request
        return bool(self._tokens) and request.kv is KvMode.STALE and 0 <= number - self._kv[-1] <= request.kv_lag

    def load(self, loaded: LoadedVersion, *, keeps_kv: bool) -> None:
        """Records that the server loaded `loaded` during the call, and whether it kept the call's KV (`keeps_kv`)."""
        self._loaded.append(loaded)
        self._kv.append(min(self._kv[-1], loaded.number) if keeps_kv else loaded.number)

    def end(self, *, has_spans: bool) -> None:
        """Ends the call and turns its tokens into segments, each sampled by one version. With `has_spans`, the versions
        are read from the server's spans; if these do not cover all tokens, the tokens are dropped and an `EngineError`
        is raised. Without `has_spans`, all tokens are of the only version that the server had during the call."""
        tokens, logprobs = np.asarray(self._tokens, np.int32), np.asarray(self._logprobs, np.float32)
        try:
            if len(tokens):
                for span in self._spans_of(len(tokens), has_spans=has_spans):
                    self.segments.append(self._segment(span, tokens, logprobs))
        finally:
            self.call = None

    def break_off(self) -> None:
        """Ends a call whose connection broke; keeps its tokens only if no load happened during the call."""
        if len(self._loaded) == 1:
            self.end(has_spans=False)
        self.call = None

    def _spans_of(self, num_tokens: int, *, has_spans: bool) -> tuple[Span, ...]:
        if not has_spans:
            assert len(self._loaded) == 1, f"the server changed weights during a call: {self._loaded}"
            return (Span(self._loaded[0].label, 0, num_tokens),)
        known = [loaded.label for loaded in self._loaded]
        at = 0
        for span in self._spans:
            if span.label not in known:
                raise EngineDied(
                    f"the server sent tokens of weights labelled {span.label!r}, which this worker did not load; let "
                    "no other program load weights into this server"
                )
            if span.start != at or span.end <= at:
                raise EngineError(
                    f"{self._label}: the server's spans (which weights sampled which tokens) leave a gap or overlap at "
                    f"token {at}: {self._spans}"
                )
            at = span.end
        if at != num_tokens:
            raise EngineError(
                f"{self._label}: the server's spans (which weights sampled which tokens) end at token {at}, but it "
                f"sent {num_tokens} tokens"
            )
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
