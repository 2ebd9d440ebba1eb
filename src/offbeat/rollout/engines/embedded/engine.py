"""The embedded engine: any transformers causal LM, in this process, behind the engine protocol.

A thread of its own takes the steps (see `stepper`); this face turns calls into commands for it and results into
answers, in batches, on the caller's event loop. Commands are taken between two steps, in the order in which they came.
With nothing to do the thread sleeps. Whatever goes wrong in it fails every request with an `EngineError`: nobody waits
for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from offbeat.rollout.engine import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineFigures,
    Generation,
    KvMode,
    Request,
    Version,
    problem_of,
)
from offbeat.rollout.engines.embedded.prefill import MIN_EXACT_ROWS
from offbeat.rollout.engines.embedded.stepper import Stepper
from offbeat.rollout.engines.embedded.weights import stage

CLOSE_WITHIN_S = 60.0
"""A step or a load ends well before this; only a stuck device does not."""


class EmbeddedEngine:
    """Implements `offbeat.rollout.engine.Engine`.

    `model` is on its device and in its dtype, and belongs to the engine from now on. `version` is the number of the
    version that it already holds; without one, `load` must come before the first `generate`. A model that has adapters
    serves versions that are adapters on the same base, whose digest is `base`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context_tokens: int,
        exact: bool = False,
        worker: str = "embedded",
        fingerprint: str | None = None,
        version: int | None = None,
        base: str | None = None,
    ):
        if exact and num_slots < MIN_EXACT_ROWS:
            raise EngineError(
                f"engine {worker}: num_slots = {num_slots}: allowed {MIN_EXACT_ROWS} or more with exact, because "
                "with fewer rows a matrix product takes another path and results depend on their number"
            )
        if num_slots < 1 or max_context_tokens < 2:
            raise EngineError(
                f"engine {worker}: num_slots = {num_slots}, max_context_tokens = {max_context_tokens}: allowed 1 and 2 "
                "or more"
            )
        self.worker, self.base = worker, base
        fingerprint = fingerprint or default_fingerprint(model, exact, num_slots)
        self._capabilities = Capabilities(
            fingerprint=fingerprint,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            splits_by_version=True,
            kv_modes=frozenset(KvMode) - ({KvMode.STALE} if exact else set()),
            exact=exact,
        )
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        with torch.inference_mode():
            self._stepper = Stepper(model.eval(), num_slots, max_context_tokens, exact, worker, fingerprint, version)
        self.seconds_still = 0.0
        self._answers: dict[object, _Answer] = {}
        """Who waits, by request id or as themselves; guarded, like the commands, by the condition's lock."""
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._ended: EngineError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"engine {worker}", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def version(self) -> int | None:
        return self._stepper.version

    @property
    def obstacle(self) -> str | None:
        """Why the model's keys and values cannot be kept, in words that follow its name; None: they are."""
        return self._stepper.usage.obstacle

    @property
    def figures(self) -> EngineFigures:
        return self._stepper.figures

    async def generate(self, request: Request) -> Generation:
        self._check(request)
        answer = _Answer()
        with self._wake:
            if request.id in self._answers:
                raise EngineError(f"engine {self.worker}: a request {request.id} is already running")
            self._post(_Command(lambda: self._stepper.submit(request)))
            self._answers[request.id] = answer
        try:
            generation: Generation = await answer.future
        except asyncio.CancelledError:
            with self._wake:
                if self._ended is None:  # nobody wants it any more: free its slot
                    self._post(_Command(lambda: self._abort([request.id])))
            raise
        return generation

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        await self._do(lambda: self._abort(ids))

    async def load(self, version: Version) -> None:
        """The files are read while generation goes on, which then stands still for a copy within the device."""
        if self._ended is not None:
            raise self._ended
        staged = await asyncio.to_thread(stage, self._stepper.model, version, self.base)

        def swap() -> None:
            start_s = time.perf_counter()
            self._stepper.load(version.number, staged)
            self.base = staged.base
            self.seconds_still += time.perf_counter() - start_s

        await self._do(swap)

    async def close(self) -> None:
        """Aborts what runs and ends the thread; a second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_WITHIN_S)
        if self._thread.is_alive():
            raise EngineError(f"engine {self.worker}: still busy {CLOSE_WITHIN_S:.0f} s after close")

    async def _do(self, action: Callable[[], None]) -> None:
        """Has the thread do something between two steps and waits until it is done."""
        answer = _Answer()
        with self._wake:
            self._post(_Command(action, answer))
            self._answers[answer] = answer
        await answer.future

    def _post(self, command: _Command) -> None:
        """Call with the lock held."""
        if self._ended is not None:
            raise self._ended
        self._commands.append(command)
        self._wake.notify()

    def _check(self, request: Request) -> None:
        """Refuses what could not run, before it reaches the others."""
        sampling = request.sampling

        def refuse(why: str) -> EngineError:
            return EngineError(f"engine {self.worker}, request {request.id}: {why}")

        if problem := problem_of(request, self.version, self.capabilities):
            raise refuse(problem)
        first, last = int(request.tokens.min()), int(request.tokens.max())
        if first < 0 or last >= self._vocab_size:
            raise refuse(f"token ids from {first} to {last}: allowed 0 to {self._vocab_size - 1}")
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
            raise refuse(f"{sampling}: allowed temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1")

    # In the thread

    def _run(self) -> None:
        ended = EngineDied(f"engine {self.worker} is closed")
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._deliver(self._stepper.step())
                self._abort(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            ended = EngineDied(f"engine {self.worker} failed: {type(error).__name__}: {error}")
            ended.__cause__ = error
        with self._wake:
            self._ended = ended
            left, self._answers = list(self._answers.values()), {}
        _resolve([(answer, ended) for answer in left])

    def _take_commands(self) -> bool:
        """Does what was asked since the last step, sleeping while there is nothing at all; False ends the thread."""
        with self._wake:
            while not self._commands and not self._closing and self._stepper.is_idle:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            going_on = not self._closing
        for command in commands:
            outcome: EngineError | None = None
            try:
                command.action()
            except EngineError as error:  # refused and nothing changed; a failure of another kind ends the engine
                outcome = error
            self._answer([(command.answer, outcome)] if command.answer else [])
        return going_on

    def _abort(self, ids: Sequence[str] | None) -> None:
        self._deliver(self._stepper.abort(ids))

    def _deliver(self, generations: Sequence[Generation]) -> None:
        self._answer([(generation.id, generation) for generation in generations])

    def _answer(self, outcomes: Sequence[tuple[object, object]]) -> None:
        """Hands outcomes to those who wait under these keys."""
        if not outcomes:
            return
        with self._wake:
            answers = [(self._answers.pop(key), outcome) for key, outcome in outcomes]
        _resolve(answers)


class _Answer:
    """A place on an event loop where somebody waits."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()


@dataclass(frozen=True)
class _Command:
    """Something for the thread to do between two steps, and who waits until it is done."""

    action: Callable[[], None]
    answer: _Answer | None = None


def _resolve(outcomes: Sequence[tuple[_Answer, object]]) -> None:
    """Wakes those who wait: one call into each event loop, however many they are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Answer, object]]] = {}
    for answer, outcome in outcomes:
        by_loop.setdefault(answer.loop, []).append((answer, outcome))
    for loop, waiting in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, waiting)
        except RuntimeError:
            if not loop.is_closed():  # a loop that is gone has nobody left who waits
                raise


def _settle(outcomes: Sequence[tuple[_Answer, object]]) -> None:
    for answer, outcome in outcomes:
        if answer.future.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, EngineError):
            answer.future.set_exception(outcome)
        else:
            answer.future.set_result(outcome)


def default_fingerprint(model: PreTrainedModel, exact: bool, num_slots: int) -> str:
    """What decides how numbers are rounded here: stamped on every segment."""
    dtype = str(model.dtype).removeprefix("torch.")
    parts = [f"torch-{torch.__version__}", f"transformers-{transformers.__version__}", dtype, model.device.type]
    if exact:  # a large matrix product may be split by threads, in a way that depends on its number of rows
        parts.append(f"exact slots-{num_slots} threads-{torch.get_num_threads()}")
    return " ".join(["embedded", *parts])
