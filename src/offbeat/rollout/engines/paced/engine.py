"""The paced engine's face: the engine protocol around `Pace`, on an event loop.

It computes when something happens next and sleeps until then: a thousand tokens cost what one costs. Clock and sleep
are given, so that it runs in real time or in any other. Whatever goes wrong fails all who wait with `EngineDied`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from offbeat.rollout.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineFigures,
    Generation,
    Request,
    Version,
    problem_of,
)
from offbeat.rollout.engines.paced.pace import Abort, Command, Load, Outcome, Pace, Submit
from offbeat.rollout.engines.paced.settings import PacedSettings

FINGERPRINT = "paced 1"


class PacedEngine:
    """Implements `offbeat.rollout.engine.Engine`. `version` is the number of a version that it holds already."""

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
        self._capabilities = Capabilities(
            fingerprint=FINGERPRINT,
            num_slots=self.settings.num_slots,
            max_context_tokens=self.settings.max_context_tokens,
            splits_by_version=self.settings.splits_by_version,
            exact=self.settings.exact,
        )
        self._pace = Pace(self.settings, version, worker, FINGERPRINT)
        self._clock, self._sleep = clock, sleep
        self.seconds_still = 0.0
        self._answers: dict[object, asyncio.Future[Any]] = {}
        """Who waits: under their request's id, or as a key of their own."""
        self._driver: asyncio.Task[None] | None = None
        self._sleeping: asyncio.Future[None] | None = None
        self._asleep_until_s, self._reached_s = math.inf, -math.inf
        self._ended: EngineDied | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> int | None:
        return self._pace.version

    @property
    def figures(self) -> EngineFigures:
        """As of the last event: what steps since then have done is told with the next."""
        return self._pace.figures

    async def generate(self, request: Request) -> Generation:
        self._check(request)
        if request.id in self._answers:
            raise EngineError(f"engine {self.worker}: a request {request.id} is already running")
        try:
            generation: Generation = await self._ask(Submit(request), request.id)
        except asyncio.CancelledError:
            if self._ended is None:  # nobody wants it any more: free its slot
                self._post(Abort([request.id], None))
            raise
        return generation

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        key = object()
        await self._ask(Abort(ids, key), key)

    async def load(self, version: Version) -> None:
        if not self.settings.splits_by_version and self._pace.num_requests:
            raise EngineError(f"engine {self.worker}: cannot load version {version.number} while requests run")
        key = object()
        await self._ask(Load(version.number, key), key)
        self.seconds_still += self.settings.load_s

    async def close(self) -> None:
        """Aborts what runs, at once; a second call does nothing."""
        if self._ended is None:
            self._deliver(self._pace.stop(self._now_s()))
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
        self._deliver(self._pace.advance(now_s))
        self._pace.command(command, now_s)
        self._deliver(self._pace.advance(now_s))
        due_s = self._pace.due_s()
        if due_s is None:
            return
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        elif self._sleeping is not None and due_s < self._asleep_until_s:
            self._sleeping.cancel()

    def _now_s(self) -> float:
        """The clock's time; never before a moment that was slept until, however coarse the clock is."""
        return max(self._clock(), self._reached_s)

    async def _drive(self) -> None:
        """Sleeps from event to event while there is one ahead; its errors reach all who wait."""
        try:
            while self._ended is None and (due_s := self._pace.due_s()) is not None:
                await self._sleep_until(due_s)
                if self._ended is None:
                    self._deliver(self._pace.advance(self._now_s()))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            ended = EngineDied(f"engine {self.worker} failed: {type(error).__name__}: {error}")
            ended.__cause__ = error
            self._end(ended)

    async def _sleep_until(self, due_s: float) -> None:
        """Returns early when something was asked that happens before."""
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
            if answer is not None and not answer.done():  # otherwise cancelled meanwhile
                answer.set_result(generation)

    def _end(self, ended: EngineDied) -> None:
        self._ended = ended
        left, self._answers = list(self._answers.values()), {}
        for answer in left:
            if not answer.done():
                answer.set_exception(ended)

    def _check(self, request: Request) -> None:
        """Refuses what could not run, before it reaches the others."""
        sampling = request.sampling

        def refuse(why: str) -> EngineError:
            return EngineError(f"engine {self.worker}, request {request.id}: {why}")

        if problem := problem_of(request, self.version, self.capabilities):
            raise refuse(problem)
        if len(set(sampling.stop_token_ids)) >= self.settings.vocab_size:
            raise refuse(f"{len(sampling.stop_token_ids)} stop tokens leave none of {self.settings.vocab_size} tokens")
