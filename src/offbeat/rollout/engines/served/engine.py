"""The engine protocol over a server of its own: `ServedEngine`, around whatever `Dialect` the server speaks.

Requests are streamed, so that what they cost is spread over the time that they take. Guarantees, beside those of the
protocol:

- weights change only while the server is paused, and it is resumed whatever happens. Where it tells which tokens came
  from which weights, requests stay inside; where not, they leave with what they have and are carried on afterwards;
- a server that does not answer, that nobody restarted for us, or whose weights are not those that this engine loaded
  last is dead to it: every call, also those that wait, ends with `EngineDied`, which names the server. There is no way
  back for the object; a new one begins by loading a version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any
from uuid import uuid4

from offbeat.control.health import Health, State
from offbeat.rollout.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineFigures,
    Finish,
    Generation,
    Request,
    problem_of,
)
from offbeat.rollout.engines.served.dialect import Dialect, Facts
from offbeat.rollout.engines.served.http import ServerAway, ServerRefused
from offbeat.rollout.engines.served.meter import Meter
from offbeat.rollout.engines.served.running import Loaded, Running
from offbeat.rollout.waiting import Changes
from offbeat.weights.version import Version

LOOK_EVERY_S = 5.0
LOOK_AGAIN_S = 0.5
"""The same while there is doubt."""
DEAD_AFTER_S = 30.0
"""A busy machine may keep a server from answering for a while."""
STUCK_AFTER_S = 600.0
"""With requests inside and not one token: it answers, but does nothing."""
ABORT_WITHIN_S = 30.0
ABORTED_PAUSE_S = 2.0
MAX_BREAKS = 3
"""Connections that one request may lose to a server that is well."""


class ServedEngine:
    """Implements `offbeat.rollout.engine.Engine`; see the module. `attach` makes one."""

    def __init__(self, dialect: Dialect, facts: Facts, *, worker: str, num_slots: int):
        self.dialect, self.facts, self.worker = dialect, facts, worker
        self._capabilities = Capabilities(
            fingerprint=facts.fingerprint,
            num_slots=num_slots,
            max_context_tokens=facts.max_context_tokens,
            splits_by_version=True,
            kv_modes=facts.kv_modes,
            is_seeded=facts.is_seeded,
        )
        self.seconds_still = 0.0
        self.health = Health(time.monotonic, DEAD_AFTER_S)
        self._meter = Meter(time.monotonic)
        self._life = uuid4().hex[:8]
        self._loaded: Loaded | None = None
        self._num_loads = 0
        self._is_loading = False
        self._load_lock = asyncio.Lock()
        self._running: dict[str, Running] = {}
        self._changes = Changes()
        self._heard_s = time.monotonic()
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended: EngineDied | None = None
        self._doubt = asyncio.Event()
        self._watch = asyncio.ensure_future(self._look())

    @classmethod
    async def attach(cls, dialect: Dialect, *, worker: str, num_slots: int) -> ServedEngine:
        """Asks a server what it is; one that cannot be worked with is refused."""
        return cls(dialect, await dialect.probe(), worker=worker, num_slots=num_slots)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded.number

    @property
    def figures(self) -> EngineFigures:
        """As far as answers told it up to now."""
        return self._meter.figures

    # Requests

    async def generate(self, request: Request) -> Generation:
        self._raise_if_ended()
        if problem := problem_of(request, self.version, self.capabilities):
            raise EngineError(f"engine {self.worker}, request {request.id}: {problem}")
        if request.id in self._running:
            raise EngineError(f"engine {self.worker}: a request {request.id} is already running")
        running = self._running[request.id] = Running(request, self.worker, self.facts.fingerprint)
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
            carrying.cancel()  # closes its connection, by which the server learns that nobody wants it any more
            self._changes.tell()

    async def _carry(self, running: Running) -> Finish:
        """Sends a request, and what is left of it again after each load that it had to leave for."""
        num_breaks = 0
        while running.over is None:
            await self._changes.until(lambda: running.is_aborted or self._may_send)
            if running.is_aborted:
                return Finish.ABORT
            num_before = running.num_tokens
            try:
                finish = await self._send(running)
                if finish is not Finish.ABORT:
                    return finish
                if not (running.is_moving or running.is_aborted) and running.num_tokens == num_before:
                    await asyncio.sleep(ABORTED_PAUSE_S)  # a server that ends answers for a moment longer
                    raise ServerAway("aborted by the server itself")
                running.is_moving = False
            except (ServerAway, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status < 500:
                    raise EngineError(f"engine {self.worker}, request {running.request.id}: {error}") from error
                running.break_off()
                num_breaks += 1
                await self._until_certain(error)
                self._raise_if_ended()
                if num_breaks >= MAX_BREAKS:
                    raise EngineError(f"engine {self.worker}, request {running.request.id}: {error}") from error
        return running.over

    @property
    def _may_send(self) -> bool:
        return not self._is_loading and self.health.may_generate

    async def _send(self, running: Running) -> Finish:
        assert self._loaded is not None
        loaded = self._loaded
        call = running.begin(loaded, self._life)
        try:
            with self._meter.inside(call):
                async with aclosing(self.dialect.generate(call)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        self._heard_s = time.monotonic()
                        running.take(chunk)
                        self._meter.take(call, chunk)
                        if chunk.finish is not None:
                            await self._check_label(loaded)
                            running.end(has_spans=self.facts.has_spans)
                            return chunk.finish
        except EngineDied as error:
            raise self._die(str(error)) from error
        finally:
            self._changes.tell()
        raise ServerAway(f"request {running.request.id}: the answer ended without a reason")

    async def _check_label(self, loaded: Loaded) -> None:
        """Where answers do not tell, the server is asked whether it still serves what it did."""
        if self.facts.has_labels and not self.facts.has_spans and (said := await self.dialect.label()) != loaded.label:
            raise EngineDied(f"its weights were called {loaded.label!r}, and are called {said!r} now")

    async def _until_certain(self, error: EngineError) -> None:
        """Waits until it is known whether the server is well; the watch ends everything where it is not."""
        self._suspect(error)
        await self._changes.until(lambda: self.health.state is not State.SUSPECT)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        self._raise_if_ended()
        chosen = self._running.values() if ids is None else [self._running[id] for id in ids if id in self._running]
        targets = list(chosen)
        for running in targets:
            running.is_aborted = True
        self._changes.tell()
        await self._empty(targets)
        await self._changes.until(lambda: not any(self._running.get(r.request.id) is r for r in targets))

    async def _empty(self, targets: Sequence[Running]) -> None:
        """Has calls end with what they have. An abort may overtake its own call, so it is repeated until all have."""
        deadline_s, pause_s = time.monotonic() + ABORT_WITHIN_S, 0.05
        while left := [running.call.id for running in targets if running.call is not None]:
            if time.monotonic() > deadline_s:
                raise self._die(f"{len(left)} requests did not end within {ABORT_WITHIN_S:g} s of being aborted")
            with self._deadly():
                await self.dialect.abort(left)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changes.until(lambda: all(running.call is None for running in targets))
            pause_s = min(2 * pause_s, 1.0)
            self._raise_if_ended()

    # Weights

    async def load(self, version: Version) -> None:
        async with self._load_lock:
            self._raise_if_ended()
            try:
                await self.dialect.stage(version)
            except ServerAway as error:  # a refusal leaves it as it was
                raise self._die(str(error)) from error
            self._raise_if_ended()
            async with self._still():
                await self._swap(version)

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Nothing is sent meanwhile; a failure in here leaves weights that nobody can vouch for."""
        start_s = time.monotonic()
        self._is_loading = True
        self._meter.stand_still(True)
        try:
            with self._deadly():
                yield
        except asyncio.CancelledError:
            self._die("a load was cut short")
            raise
        finally:
            self._is_loading = False
            self._meter.stand_still(False)
            self._heard_s = time.monotonic()
            self.seconds_still += self._heard_s - start_s
            self._changes.tell()

    async def _swap(self, version: Version) -> None:
        self._num_loads += 1
        loaded = Loaded(version.number, f"{version.number}-{self._life}-{self._num_loads}")
        inside = [running for running in self._running.values() if running.call is not None]
        keeping = [running for running in inside if self.facts.has_spans and running.may_keep_kv(version.number)]
        if keeping or not self.facts.has_spans:  # a pause forgets all KV or none
            await self._move([running for running in inside if running not in keeping])
        try:
            await self.dialect.pause(keeps_kv=bool(keeping))
            await self.dialect.load(version, loaded.label)
            said = await self.dialect.label()
            if self.facts.has_labels and said != loaded.label:
                raise EngineDied(f"its weights are called {said!r} after they were loaded as {loaded.label!r}")
            for running in inside:
                if running.call is not None:
                    running.load(loaded, keeps_kv=running in keeping)
                    if running not in keeping:
                        self._meter.refill(running.call)
            self._loaded = loaded
        finally:
            await self.dialect.resume()
        if self.health.state is State.DEAD:  # a request found nobody there meanwhile
            raise EngineDied(self.health.why)
        self.health.refreshed(said)

    async def _move(self, leaving: Sequence[Running]) -> None:
        for running in leaving:
            running.is_moving = True
        await self._empty(leaving)

    # Health

    async def _look(self) -> None:
        """Asks every few seconds how the server is, at once where there is doubt; ends the engine where it is dead."""
        while self._ended is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), LOOK_EVERY_S)
            if self._is_loading or self._loaded is None:
                self._doubt.clear()
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            before = self._loaded
            try:
                await self.dialect.check()
                said = await self.dialect.label()
            except EngineError as error:
                self._suspect(error)
            else:
                if self._is_loading or self._loaded is not before:
                    continue
                self._doubt.clear()
                self.health.answered(said)
            self._judge()
            self._changes.tell()
            if self._doubt.is_set():
                await asyncio.sleep(LOOK_AGAIN_S)

    def _suspect(self, error: EngineError) -> None:
        if isinstance(error, ServerAway) and error.is_refused:
            self.health.gone(str(error))  # nobody listens there: whoever comes next has other weights
        else:
            self.health.failed(str(error))
        self._doubt.set()

    def _judge(self) -> None:
        quiet_s = time.monotonic() - self._heard_s
        if self.health.state is State.DEAD:
            self._die(f"it is dead: {self.health.why}")
        elif self.health.state is State.STALE:
            self._die(f"its weights are not those that were loaded last: {self.health.why}")
        elif quiet_s > STUCK_AFTER_S and any(running.call is not None for running in self._running.values()):
            self._die(f"not one token for {quiet_s:.0f} s, with requests inside")
        elif not any(running.call is not None for running in self._running.values()):
            self._heard_s = time.monotonic()

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """What fails in here leaves the server in a state that nobody knows."""
        try:
            yield
        except EngineError as error:
            raise self._die(str(error)) from error

    def _die(self, why: str) -> EngineDied:
        if self._ended is None:
            self._ended = EngineDied(f"engine {self.worker} ({self.facts.name}): {why}")
            if not self._death.done():
                self._death.set_result(None)
            self._changes.tell()
        return self._ended

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def close(self) -> None:
        """Ends what runs and leaves the server to itself; a second call does nothing."""
        if self._ended is None:
            with suppress(EngineError):
                await self.abort()
            self._die("it is closed")
        self._watch.cancel()
        await asyncio.wait({self._watch})
        await self.dialect.close()
