"""Implementation of the paced engine; `offbeat.testing.paced` describes it.

`PacedEngine` implements the engine protocol on an event loop. `PacedClock` computes when each decode step ends, and
what happens between two steps; it neither waits nor reads a clock.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from offbeat.engines.cached_prefixes import CachedPrefix, CachedPrefixes
from offbeat.engines.protocol import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineMetrics,
    Finish,
    Generation,
    KvMode,
    Request,
    Version,
    problem_of,
)
from offbeat.testing.paced import noise
from offbeat.testing.paced.settings import PacedSettings
from offbeat.trajectory import Segment

FINGERPRINT = "paced 1"
SAME = 1e-9
"""Rounding tolerance: a time within this fraction of a step from the step's end counts as the end."""


class PacedEngine:
    """Implements `offbeat.engines.protocol.Engine`.

    `version` is the version that the engine serves from the start; None: it serves nothing before the first load.
    `clock` and `sleep` may be replaced to run in simulated time.
    """

    def __init__(
        self,
        settings: PacedSettings | None = None,
        *,
        worker: str = "paced",
        version: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.settings, self.worker = settings or PacedSettings(), worker
        self.capabilities = Capabilities(
            fingerprint=FINGERPRINT,
            num_slots=self.settings.num_slots,
            max_context_tokens=self.settings.max_context_tokens,
            splits_by_version=self.settings.splits_by_version,
            exact=self.settings.exact,
        )
        self._paced = PacedClock(self.settings, version, worker, FINGERPRINT)
        self._clock, self._sleep = clock, sleep
        self.seconds_still = 0.0
        self._answers: dict[object, asyncio.Future[Any]] = {}
        """Futures of waiting callers, by request id, or by a unique key for loads and aborts."""
        self._driver: asyncio.Task[None] | None = None
        self._sleeping: asyncio.Future[None] | None = None
        self._asleep_until_s, self._reached_s = math.inf, -math.inf
        self._ended: EngineDied | None = None

    @property
    def version(self) -> int | None:
        return self._paced.version

    @property
    def metrics(self) -> EngineMetrics:
        """Metrics up to the last event, such as a load or the end of a request. The next event adds the steps since
        then."""
        return self._paced.metrics

    async def generate(self, request: Request) -> Generation:
        self._check(request)
        if request.id in self._answers:
            raise EngineError(f"engine {self.worker}: request {request.id} is already running")
        try:
            generation: Generation = await self._ask(Submit(request), request.id)
        except asyncio.CancelledError:
            if self._ended is None:  # frees the slot of the request
                self._post(Abort([request.id], None))
            raise
        return generation

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        key = object()
        await self._ask(Abort(ids, key), key)

    async def load(self, version: Version) -> None:
        if not self.settings.splits_by_version and self._paced.num_requests:
            raise EngineError(
                f"engine {self.worker}: cannot load version {version.number} while requests run; abort them first"
            )
        key = object()
        await self._ask(Load(version.number, key), key)
        self.seconds_still += self.settings.load_s

    async def close(self) -> None:
        """Aborts all requests at once; a second call does nothing."""
        if self._ended is None:
            self._deliver(self._paced.stop(self._now_s()))
            self._end(EngineDied(f"engine {self.worker} is closed"))
        if self._sleeping is not None:
            self._sleeping.cancel()
        if self._driver is not None and not self._driver.done():
            await asyncio.wait({self._driver})

    def _ask(self, command: Command, key: object) -> asyncio.Future[Any]:
        if self._ended is not None:
            raise self._ended
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._post(command)
        return answer

    def _post(self, command: Command) -> None:
        now_s = self._now_s()
        self._deliver(self._paced.advance(now_s))
        self._paced.command(command, now_s)
        self._deliver(self._paced.advance(now_s))
        due_s = self._paced.due_s()
        if due_s is None:
            return
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        elif self._sleeping is not None and due_s < self._asleep_until_s:
            self._sleeping.cancel()

    def _now_s(self) -> float:
        """Returns the clock's time. If a coarse clock is still behind the time at which the last sleep had to end,
        returns that time instead."""
        return max(self._clock(), self._reached_s)

    async def _drive(self) -> None:
        """Carries out each event when it is due. An unexpected error ends the engine and all calls that wait for it."""
        try:
            while self._ended is None and (due_s := self._paced.due_s()) is not None:
                await self._sleep_until(due_s)
                if self._ended is None:
                    self._deliver(self._paced.advance(self._now_s()))
        except Exception as error:  # noqa: BLE001 - raised at every waiting caller
            ended = EngineDied(f"engine {self.worker} failed: {type(error).__name__}: {error}")
            ended.__cause__ = error
            self._end(ended)

    async def _sleep_until(self, due_s: float) -> None:
        """Sleeps until `due_s`; returns early if a command brings an event forward, or if the engine is closed."""
        self._asleep_until_s = due_s
        self._sleeping = asyncio.ensure_future(self._sleep(max(0.0, due_s - self._clock())))
        try:
            await asyncio.wait({self._sleeping})
            if not self._sleeping.cancelled():
                self._sleeping.result()
                self._reached_s = due_s
        finally:
            self._sleeping.cancel()
            self._sleeping = None

    def _deliver(self, outcomes: Iterable[Outcome]) -> None:
        for key, generation in outcomes:
            answer = self._answers.pop(key, None)
            if answer is not None and not answer.done():  # otherwise it was cancelled meanwhile
                answer.set_result(generation)

    def _end(self, ended: EngineDied) -> None:
        self._ended = ended
        left, self._answers = list(self._answers.values()), {}
        for answer in left:
            if not answer.done():
                answer.set_exception(ended)

    def _check(self, request: Request) -> None:
        """Raises `EngineError` if a request cannot run, before it is queued."""
        problem = problem_of(request, self.version, self.capabilities)
        if not problem and len(set(request.sampling.stop_token_ids)) >= self.settings.vocab_size:
            problem = f"its stop tokens cover the whole vocabulary of {self.settings.vocab_size} tokens; leave out one"
        if problem:
            raise EngineError(f"engine {self.worker}, request {request.id}: {problem}")


Outcome = tuple[object, Generation | None]
"""Key of a waiting caller and the result for that caller: a generation, or None after a load or an abort."""


@dataclass(frozen=True)
class Submit:
    request: Request


@dataclass(frozen=True)
class Abort:
    ids: Sequence[str] | None
    """Requests to abort; None: all."""
    key: object


@dataclass(frozen=True)
class Load:
    version: int
    key: object


Command = Submit | Abort | Load


@dataclass(frozen=True)
class PacedRow:
    """A running request, which takes one of the engine's slots. Step `first_step + 1` samples its first token."""

    request: Request
    first_step: int
    num_tokens: int
    finish: Finish

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_tokens

    def context_at(self, step: int) -> int:
        """Returns the row's number of tokens after a step."""
        return len(self.request.tokens) + step - self.first_step


class PacedClock:
    """Modelled time of a paced engine. All calls must use times of one clock, which never goes backwards.

    All rows (running requests) take each decode step together. Between two steps, finished rows leave, then commands
    are taken in the order of their arrival, then waiting requests take free slots. Until one of these events happens,
    all steps take the same time, so the time of the next event is computed directly. `due_s` returns this time, and
    `advance` carries the event out. A load stops all steps; afterwards all running requests are prefilled again. A
    resumed request is prefilled only beyond its cached prefix, or in whole if there was a load in between.
    """

    def __init__(self, settings: PacedSettings, version: int | None, worker: str, fingerprint: str):
        self.settings, self.version, self.worker, self.fingerprint = settings, version, worker, fingerprint
        self._rows: dict[str, PacedRow] = {}
        self._waiting: dict[str, Request] = {}
        self._ends: list[tuple[int, str]] = []
        """Heap of (last step, request id); entries of aborted rows are skipped when they come up."""
        self._commands: deque[tuple[float, Command]] = deque()
        self._loading: tuple[float, Load] | None = None
        self._versions: list[tuple[int, int]] = [] if version is None else [(0, version)]
        """Step at which each version was loaded, and the version's number."""
        self._unfilled: dict[str, int] = {}
        """Number of tokens to prefill before the next step, by request."""
        self._cached, self._slots = CachedPrefixes(), count()
        self._context = 0
        """Sum of the context tokens of all rows after the last event."""
        self.metrics = EngineMetrics()
        self._step, self._start_s, self._prefill_s, self._step_s = 0, -math.inf, 0.0, 0.0
        """Step and time of the last event, seconds of the prefill after it, and seconds of each following step."""

    @property
    def num_requests(self) -> int:
        return len(self._rows) + len(self._waiting) + sum(isinstance(c, Submit) for _, c in self._commands)

    def command(self, command: Command, now_s: float) -> None:
        """Queues a command for the end of the current step; call `advance(now_s)` before and after this call."""
        self._commands.append((now_s, command))

    def due_s(self) -> float | None:
        """Returns the time of the next event, provided that no further command arrives before then; None if no event is
        to come."""
        if self._loading is not None:
            return self._loading[0]
        if (step := self._next_step()) is not None:
            return self._time_of(step)
        return max(self._start_s, self._commands[0][0]) if self._commands else None

    def advance(self, now_s: float) -> list[Outcome]:
        """Carries out all events up to `now_s`; returns the answers for waiting callers."""
        outcomes: list[Outcome] = []
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            outcomes += self._end_load() if self._loading is not None else self._between_steps(due_s)
        return outcomes

    def stop(self, now_s: float) -> list[Outcome]:
        """Aborts all requests; returns answers for waiting callers, with the tokens of steps completed by `now_s`."""
        outcomes = self.advance(now_s)
        if self._rows and self._loading is None and now_s > self._start_s:
            num_steps = math.floor((now_s - self._start_s - self._prefill_s) / self._step_s + SAME)
            self._go_to(self._step + max(0, num_steps))
        left = [command for _, command in self._commands]
        self._commands.clear()
        self._waiting |= {command.request.id: command.request for command in left if isinstance(command, Submit)}
        aborted = [(command.key, None) for command in left if isinstance(command, Abort)]
        return [*outcomes, *self._abort(None), *aborted]

    def _next_step(self) -> int | None:
        """Returns the step at whose end a row finishes next or a command is taken; None if there are no rows."""
        while self._ends and not self._is_live(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._rows:
            return None
        step = self._ends[0][0]
        return min(step, self._step_at(self._commands[0][0])) if self._commands else step

    def _step_at(self, moment_s: float) -> int:
        """Returns the first step that ends at or after `moment_s`."""
        if moment_s <= self._start_s:
            return self._step
        return self._step + max(1, math.ceil((moment_s - self._start_s - self._prefill_s) / self._step_s - SAME))

    def _time_of(self, step: int) -> float:
        num_steps = step - self._step
        return self._start_s + self._prefill_s + num_steps * self._step_s if num_steps else self._start_s

    def _between_steps(self, now_s: float) -> list[Outcome]:
        step = self._next_step()
        if step is not None:
            self._go_to(step)
        came = [command for at_s, command in self._commands if at_s <= now_s + SAME * self._step_s]
        self._start_s = now_s
        outcomes = list(self._leave())
        for command in came:
            if self._loading is not None:
                break
            self._commands.popleft()
            outcomes += self._take(command, now_s)
        self._fill_slots()
        return outcomes

    def _go_to(self, step: int) -> None:
        """Carries out the pending prefill and all steps up to `step`."""
        num_steps, num_rows = step - self._step, len(self._rows)
        if not num_steps:
            return
        self.metrics += EngineMetrics(
            num_steps=num_steps,
            num_rows=num_steps * num_rows,
            num_context_tokens=num_steps * self._context + num_rows * num_steps * (num_steps - 1) // 2,
            num_prefilled_tokens=self._num_unfilled,
        )
        self._context += num_steps * num_rows
        self._step = step
        self._unfilled.clear()

    @property
    def _num_unfilled(self) -> int:
        return sum(num_tokens for name, num_tokens in self._unfilled.items() if name in self._rows)

    def _leave(self) -> Iterator[Outcome]:
        while self._ends and self._ends[0][0] <= self._step:
            if self._is_live(self._ends[0]):
                row = self._remove(self._ends[0][1])
                yield row.request.id, self._generation(row, row.finish)
            heapq.heappop(self._ends)

    def _is_live(self, end: tuple[int, str]) -> bool:
        row = self._rows.get(end[1])
        return row is not None and row.last_step == end[0]

    def _take(self, command: Command, now_s: float) -> list[Outcome]:
        match command:
            case Submit(request):
                self._waiting[request.id] = request
            case Abort(ids, key):
                return [*self._abort(ids), (key, None)]
            case Load():
                self._loading = (now_s + self.settings.load_s, command)
        return []

    def _end_load(self) -> list[Outcome]:
        assert self._loading is not None
        self._start_s, load = self._loading
        self._loading, self.version = None, load.version
        self._versions = [*(self._versions if self._rows else ()), (self._step, load.version)]
        self._cached.load(load.version)
        self._unfilled = {name: row.context_at(self._step) for name, row in self._rows.items()}
        self._fill_slots()
        return [(load.key, None)]

    def _fill_slots(self) -> None:
        """Starts waiting requests in free slots, and sets the times of the next prefill and steps."""
        if self._loading is not None:
            return
        while self._waiting and len(self._rows) < self.settings.num_slots:
            name = next(iter(self._waiting))
            row = self._planned(self._waiting.pop(name))
            self._rows[name] = row
            self._unfilled[name] = self._num_to_prefill(row.request)
            self._context += len(row.request.tokens)
            heapq.heappush(self._ends, (row.last_step, name))
        self._cached.keep_newest(self.settings.num_slots - len(self._rows))
        self._prefill_s = self.settings.fill_s(self._num_unfilled)
        self._step_s = self.settings.step_s(len(self._rows))

    def _num_to_prefill(self, request: Request) -> int:
        """Returns how many tokens of a request must be prefilled, and takes its prefix out of the cache. Without a
        cached prefix, these are all tokens. Otherwise they are the tokens after the prefix, except the last, which the
        first step processes."""
        prefix = None if self.version is None else self._cached.find(request, self.version)
        if prefix is None:
            return len(request.tokens)
        self._cached.drop(prefix.slot)
        num_resumed = prefix.num_usable(request)
        self.metrics += EngineMetrics(num_resumed_tokens=num_resumed)
        return len(request.tokens) - 1 - num_resumed

    def _planned(self, request: Request) -> PacedRow:
        budget = request.sampling.max_new_tokens
        if request.sampling.stop_token_ids:
            left = max(1, self.settings.lengths.num_tokens(request.seed) - request.position)
            if left <= budget:
                return PacedRow(request, self._step, left, Finish.STOP)
        return PacedRow(request, self._step, budget, Finish.LENGTH)

    def _abort(self, ids: Sequence[str] | None) -> Iterator[Outcome]:
        for name in [*self._rows, *self._waiting] if ids is None else ids:
            if name in self._rows:
                row = self._remove(name)
                generation = self._generation(row, Finish.ABORT)
                self._cache(row.request, generation)
                yield name, generation
            elif self._waiting.pop(name, None) is not None:
                yield name, Generation(name, (), Finish.ABORT)

    def _remove(self, name: str) -> PacedRow:
        row = self._rows.pop(name)
        self._context -= row.context_at(self._step)
        return row

    def _cache(self, request: Request, generation: Generation) -> None:
        """Caches the prefix of an aborted request: all its tokens except the last."""
        if request.kv is KvMode.REFILL or not generation.segments:
            return
        assert self.version is not None
        tokens = np.concatenate([request.tokens, *(segment.tokens for segment in generation.segments)])
        num_prompt = len(request.tokens) - request.position
        self._cached.add(CachedPrefix(next(self._slots), tokens[:-1], num_prompt, self.version))

    def _generation(self, row: PacedRow, finish: Finish) -> Generation:
        """Returns the tokens of a row so far, split into one segment per version."""
        cuts = [(max(step, row.first_step), version) for step, version in self._versions]
        segments: list[Segment] = []
        for (start, version), end in zip(cuts, [*(step for step, _ in cuts[1:]), self._step], strict=True):
            if end > start:
                segments.append(self._segment(row, start, end, version))
        if finish is Finish.STOP:
            segments[-1].tokens[-1] = row.request.sampling.stop_token_ids[0]
        return Generation(row.request.id, tuple(segments), finish)

    def _segment(self, row: PacedRow, first_step: int, last_step: int, version: int) -> Segment:
        request, count = row.request, last_step - first_step
        start = request.position + first_step - row.first_step
        stops = request.sampling.stop_token_ids
        return Segment(
            start=start,
            tokens=noise.tokens(request.seed, start, count, self.settings.vocab_size, stops),
            logprobs=noise.logprobs(request.seed, start, count, version),
            version=version,
            kv_version=version,
            worker=self.worker,
            engine=self.fingerprint,
        )
