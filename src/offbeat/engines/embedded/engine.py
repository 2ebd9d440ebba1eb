"""The embedded engine: any transformers causal LM, in this process, behind the engine protocol.

A separate thread takes the decode steps (see `stepper`). Between two steps it carries out, in order, the calls that
other threads have made meanwhile. An unexpected error in the thread fails every request with an `EngineDied`, so no
caller waits forever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from offbeat.engines.embedded.prefill import MIN_EXACT_ROWS
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.embedded.weights import stage
from offbeat.engines.protocol import (
    Capabilities,
    EngineDied,
    EngineError,
    EngineMetrics,
    Generation,
    KvMode,
    Request,
    Version,
    problem_of,
)

Answer = asyncio.Future[Any]
"""Future on which a caller waits, in its own event loop."""
CLOSE_WITHIN_S = 60.0
"""Deadline of `close`; longer than any step or load takes on a working device."""


class EmbeddedEngine:
    """Implements `offbeat.engines.protocol.Engine`.

    The engine takes over `model`, which must already have its device and dtype. `version` is the version whose weights
    the model holds; None: call `load` before the first `generate`. `base` is the digest of the weights that the model's
    adapters belong to; None for a model without adapters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context_tokens: int,
        exact: bool = False,
        worker: str = "embedded",
        version: int | None = None,
        base: str | None = None,
    ):
        if exact and num_slots < MIN_EXACT_ROWS:
            raise EngineError(
                f"engine {worker}: rollout.slots = {num_slots}: must be {MIN_EXACT_ROWS} or more with run.exact, "
                "because the results of smaller matrix products depend on their number of rows"
            )
        if num_slots < 1 or max_context_tokens < 2:
            raise EngineError(
                f"engine {worker}: num_slots = {num_slots} must be at least 1, and max_context_tokens = "
                f"{max_context_tokens} at least 2"
            )
        self.worker, self.base = worker, base
        fingerprint = default_fingerprint(model, exact, num_slots)
        self.capabilities = Capabilities(
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
        self._answers: dict[object, Answer] = {}
        """Waiting callers' futures, by request id for `generate` and by the future itself for other calls. The lock of
        `_wake` guards this and `_commands`."""
        self._commands: deque[tuple[Callable[[], None], Answer | None]] = deque()
        self._wake = threading.Condition()
        self._ended: EngineError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"engine {worker}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        return self._stepper.version

    @property
    def obstacle(self) -> str | None:
        """Why keys and values cannot be cached, in words that follow the model's name, such as "does not take
        position_ids"; None: they are cached."""
        return self._stepper.usage.obstacle

    @property
    def metrics(self) -> EngineMetrics:
        return self._stepper.metrics

    async def generate(self, request: Request) -> Generation:
        self._check(request)
        answer: Answer = asyncio.get_running_loop().create_future()
        with self._wake:
            if request.id in self._answers:
                raise EngineError(f"engine {self.worker}: a request with id {request.id} is already running")
            self._post(lambda: self._stepper.submit(request))
            self._answers[request.id] = answer
        try:
            generation: Generation = await answer
        except asyncio.CancelledError:
            with self._wake:
                if self._ended is None:  # frees its slot
                    self._post(lambda: self._abort([request.id]))
            raise
        return generation

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        await self._do(lambda: self._abort(ids))

    async def load(self, version: Version) -> None:
        """Loads a version; generation goes on while its files are read, and stops while its weights are copied in."""
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
        """Aborts all requests and ends the thread; a second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_WITHIN_S)
        if self._thread.is_alive():
            raise EngineError(
                f"engine {self.worker}: its thread has not ended {CLOSE_WITHIN_S:.0f} s after close; end this process"
            )

    async def _do(self, action: Callable[[], None]) -> None:
        """Runs an action in the engine's thread, between two decode steps, and waits until it is done."""
        answer: Answer = asyncio.get_running_loop().create_future()
        with self._wake:
            self._post(action, answer)
            self._answers[answer] = answer
        await answer

    def _post(self, action: Callable[[], None], answer: Answer | None = None) -> None:
        """Queues an action for the thread, which resolves `answer` afterwards. The caller must hold `_wake`."""
        if self._ended is not None:
            raise self._ended
        self._commands.append((action, answer))
        self._wake.notify()

    def _check(self, request: Request) -> None:
        """Raises an `EngineError` if a request cannot run, so that it cannot disturb other requests."""
        sampling, problem = request.sampling, problem_of(request, self.version, self.capabilities)
        if not problem:
            first, last = int(request.tokens.min()), int(request.tokens.max())
            if first < 0 or last >= self._vocab_size:
                problem = f"its token ids range from {first} to {last}; they must be 0 to {self._vocab_size - 1}"
            elif not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
                problem = f"{sampling}; there must be temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
        if problem:
            raise EngineError(f"engine {self.worker}, request {request.id}: {problem}")

    # In the thread

    def _run(self) -> None:
        ended = EngineDied(f"engine {self.worker} is closed")
        try:
            with torch.inference_mode(), self._own_stream():
                self._stepper.record()  # here, because the caller has other things to prepare meanwhile
                while self._take_commands():
                    self._deliver(self._stepper.step())
                self._abort(None)
        except Exception as error:  # noqa: BLE001 - every waiting caller must get it
            ended = EngineDied(f"engine {self.worker} failed: {type(error).__name__}: {error}")
            ended.__cause__ = error
        with self._wake:
            self._ended = ended
            left, self._answers = list(self._answers.values()), {}
        _resolve([(answer, ended) for answer in left])

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Within the block, GPU work goes to a stream of this thread's own, which has priority over other streams. In
        the default stream, a step would wait for all that the trainer has launched. With `exact`, the default stream is
        used, because nobody trains meanwhile."""
        device = self._stepper.model.device
        if device.type != "cuda" or self.capabilities.exact:
            yield
            return
        stream = torch.cuda.Stream(device, priority=-1)
        stream.wait_stream(torch.cuda.default_stream(device))  # the model's weights may still be on their way
        with torch.cuda.stream(stream):
            yield

    def _take_commands(self) -> bool:
        """Sleeps while there is nothing to do, then runs the queued commands. Returns False if the thread must end."""
        with self._wake:
            while not self._commands and not self._closing and self._stepper.is_idle:
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            going_on = not self._closing
        for action, answer in commands:
            outcome: EngineError | None = None
            try:
                action()
            except EngineError as error:  # a refusal, which changed nothing; any other error ends the engine
                outcome = error
            self._answer([(answer, outcome)] if answer else [])
        return going_on

    def _abort(self, ids: Sequence[str] | None) -> None:
        self._deliver(self._stepper.abort(ids))

    def _deliver(self, generations: Sequence[Generation]) -> None:
        self._answer([(generation.id, generation) for generation in generations])

    def _answer(self, outcomes: Sequence[tuple[object, object]]) -> None:
        """Delivers each (key, outcome) to the caller that waits under the key in `_answers`."""
        if not outcomes:
            return
        with self._wake:
            answers = [(self._answers.pop(key), outcome) for key, outcome in outcomes]
        _resolve(answers)


def _resolve(outcomes: Sequence[tuple[Answer, object]]) -> None:
    """Gives each waiting caller its outcome, a result or an error, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answer, object]]] = {}
    for answer, outcome in outcomes:
        by_loop.setdefault(answer.get_loop(), []).append((answer, outcome))
    for loop, waiting in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, waiting)
        except RuntimeError:
            if not loop.is_closed():  # a closed loop has no waiting callers
                raise


def _settle(outcomes: Sequence[tuple[Answer, object]]) -> None:
    for answer, outcome in outcomes:
        if answer.done():  # cancelled meanwhile
            continue
        if isinstance(outcome, EngineError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


def default_fingerprint(model: PreTrainedModel, exact: bool, num_slots: int) -> str:
    """Returns a text that names everything that affects the rounding of results; it is stored with every segment."""
    dtype = str(model.dtype).removeprefix("torch.")
    parts = [f"torch-{torch.__version__}", f"transformers-{transformers.__version__}", dtype, model.device.type]
    if exact:  # threads may split a large matrix product in a way that depends on its number of rows
        parts.append(f"exact slots-{num_slots} threads-{torch.get_num_threads()}")
    return " ".join(["embedded", *parts])
