"""Scenes of partial rollouts: the embedded engine with a tiny model, at a desk in memory or at a whole coordinator.

The version of step n has the weights of `model_of(n)`, and without a resume the number n, so that every log-prob can be
checked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_coordinator import a_task
from tiny_models import tiny_model
from transformers import PreTrainedModel
from whole_coordinator import opened

from offbeat.client.in_process import InProcessTrainer, InProcessWorker
from offbeat.config import from_dict
from offbeat.coordinator.coordinator import Coordinator
from offbeat.engines.embedded import EmbeddedEngine
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.protocol import Finish
from offbeat.ledger.records import Batch
from offbeat.trajectory import End, Task, Trajectory
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Version
from offbeat.worker.worker import ActiveTask, Worker, append, begin, request_for

torch.set_num_threads(1)  # models are tiny, and cores are shared

VOCAB_SIZE = 258
"""That of the shipped tokenizer."""
END_TOKEN = 257
CONTEXT_TOKENS = 128
SOON_S = 60.0
"""Longest wait for what happens at once on an idle machine."""
TOLERANCE = 1e-4
"""Of log-probs: a step and a whole forward pass add up in other orders."""


def model_of(number: int) -> PreTrainedModel:
    """The model of a step's version, for an engine to own. Answers end anywhere."""
    model = tiny_model(seed=number, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        model.lm_head.weight[END_TOKEN] *= 4
    return model


@cache
def _known_model(number: int) -> PreTrainedModel:
    return model_of(number)


def write_version(store: Publisher, number: int, step: int, parent: int | None) -> Version:
    return store.write(number, step, parent, dict(_known_model(step).state_dict()))


def new_stepper(number: int = 0, **options: Any) -> Stepper:
    """The embedded engine without its thread: nothing happens but what a test does."""
    options = {"num_slots": 16, "max_context_tokens": CONTEXT_TOKENS, "exact": False, **options}
    with torch.inference_mode():
        return Stepper(model_of(number), worker="w", fingerprint="tiny", version=number, **options)


def own_task(number: int, max_new_tokens: int) -> Task:
    """A task whose prompt is no other's, so that nothing of it is shared."""
    return replace(a_task(number, max_new_tokens), prompt=np.arange(5) + 1 + number)


def carry_on(stepper: Stepper, running: ActiveTask, num_steps: int | None = None) -> bool:
    """Generates as a worker would, until the answer ends or after so many steps it is cut; tells whether it ended."""
    if running.trajectory.num_tokens == running.trajectory.max_new_tokens:
        running.trajectory.finish(End.LENGTH)
        return True
    with torch.inference_mode():
        stepper.submit(request_for(running))
        ended = []
        while not ended and num_steps != 0:
            ended = stepper.step()
            num_steps = None if num_steps is None else num_steps - 1
        (generation,) = ended or stepper.abort(None)
    assert ended or generation.finish is Finish.ABORT
    return append(running.trajectory, generation)


def handed_on(task: Task, running: ActiveTask) -> Task:
    """The task as its next worker gets it: with what was handed back, by way of the wire."""
    prefix = Trajectory.decode(running.trajectory.encode()) if running.trajectory.num_tokens else None
    return replace(task, prefix=prefix, fence=task.fence + 1)


def carry_on_in_parts(stepper: Stepper, task: Task, cuts: Sequence[int]) -> Trajectory:
    """An answer that was cut after so many steps, each time handed on, and then came to its end."""
    for num_steps in cuts:
        running = begin(task)
        if carry_on(stepper, running, num_steps):
            return running.trajectory
        task = handed_on(task, running)
    running = begin(task)
    assert carry_on(stepper, running)
    return running.trajectory


def assert_logprobs_are_the_versions_own(trajectory: Trajectory) -> None:
    """Each segment's log-probs are those of the forward pass of the version that it names, and of no other."""
    whole = torch.tensor(np.concatenate([trajectory.prompt, trajectory.tokens]), dtype=torch.int64)
    first = len(trajectory.prompt)
    for segment in trajectory.segments:
        with torch.no_grad():
            logits = _known_model(segment.version)(whole.unsqueeze(0)).logits[0].float()
        own = logits.log_softmax(-1)[:-1].gather(1, whole[1:, None]).squeeze(1).numpy()
        expected = own[first + segment.start - 1 : first + segment.end - 1]
        np.testing.assert_allclose(segment.logprobs, expected, atol=TOLERANCE, err_msg=f"segment {segment.start}")


class SteppedEngine(EmbeddedEngine):
    """An embedded engine that takes no more steps than it is allowed to, so that a test can say when it is cut."""

    def __init__(self, number: int | None = None, *, num_slots: int = 16, **options: Any):
        options = {"max_context_tokens": CONTEXT_TOKENS, "version": number, **options}
        super().__init__(model_of(number or 0), num_slots=num_slots, **options)
        self._steps_left, self._steps_lock = 0, threading.Lock()
        step = self._stepper.step

        def step_if_allowed() -> list[Any]:
            if self.is_idle:
                return []
            with self._steps_lock:
                is_allowed = self._steps_left > 0
                self._steps_left -= is_allowed
            if is_allowed:
                return step()
            time.sleep(0.001)  # commands are taken in between
            return []

        self._stepper.step = step_if_allowed

    @property
    def steps_left(self) -> int:
        """Those with something to do in them."""
        return self._steps_left

    @steps_left.setter
    def steps_left(self, num_steps: int) -> None:
        with self._steps_lock:
            self._steps_left = num_steps

    @property
    def num_requests(self) -> int:
        return len(self._stepper.running) + len(self._stepper.waiting)

    async def take(self, num_steps: int) -> None:
        """Allows so many steps, and waits until they are taken."""
        self.steps_left = num_steps
        await until(lambda: self.steps_left == 0, f"{num_steps} steps")

    @property
    def is_idle(self) -> bool:
        return self._stepper.is_idle


async def generate_until(engine: SteppedEngine, condition: Callable[[], Awaitable[object]]) -> None:
    """Takes one step after another, until something is so."""
    while not await condition():
        engine.steps_left = 1
        await until(lambda: engine.steps_left == 0 or engine.is_idle, "a step")
        await asyncio.sleep(0.005)  # what has ended is handed in and scored meanwhile


async def until(condition: Callable[[], object | Awaitable[object]], what: str) -> None:
    """Waits for something to come about elsewhere."""
    deadline_s = time.monotonic() + SOON_S
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def whole(
    folder: Path, *, function: Callable[..., Any] | None = None, **sections: Any
) -> AsyncIterator[Coordinator]:
    """A coordinator of a run in rounds: two groups of two a step, twice as many under way. `function` is a reward."""
    config = from_dict(
        {
            "run": {"steps": 6},
            "batch": {"groups_per_step": 2, "group_size": 2},
            "schedule": {"max_staleness": 2, "over_provision": 2.0},
            "rollout": {"max_new_tokens": 48},
            "eval": {"every": 0},
            **sections,
        }
    )
    async with opened(config, folder, reward=function) as (made, tokens):
        assert (tokens.vocab_size, tokens.tokenizer.eos_token_id) == (VOCAB_SIZE, END_TOKEN)
        made.tokens = tokens  # for `coordinator_scenes.answer`
        yield made


@asynccontextmanager
async def working(
    made: Coordinator, engine: EmbeddedEngine, name: str = "w", client: Any = None, **options: Any
) -> AsyncIterator[Worker]:
    """A worker at a coordinator; at the end it is cancelled, as if it were killed."""
    worker = Worker(name, engine, client or InProcessWorker(made, name), **options)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.wait({running})
        await engine.close()
        if not running.cancelled():
            running.result()


class Teacher:
    """A trainer that learns nothing: claims, publishes, commits. What it learns from is kept."""

    def __init__(self, made: Coordinator, folder: Path):
        self.made, self.client, self.store = made, InProcessTrainer(made), Publisher(folder / "weights")
        self.version: Version | None = None
        self.step = 0
        self.batches: list[Batch] = []

    async def begin(self) -> None:
        """Publishes the first version, or after a restart the newest again."""
        before = await self.made.call(self.made.ledger.latest_version)
        self.step = before.step if before else 0
        await self.client.reconcile(self.step, before.number if before else None)
        await self._publish(self.client.publish, before.number if before else None)

    async def claim(self) -> Batch:
        self.batches.append(await self.client.claim(self.step, SOON_S))
        return self.batches[-1]

    async def commit(self) -> None:
        step, self.step = self.step, self.step + 1
        assert self.version is not None
        await self._publish(lambda version: self.client.commit(step, version), self.version.number)

    async def _publish(self, tell: Callable[[Version], Awaitable[None]], parent: int | None) -> None:
        self.version = write_version(self.store, await self.client.next_version(), self.step, parent)
        await tell(self.version)


async def num_ready(made: Coordinator) -> int:
    """Groups that could be trained now."""
    return (await made.call(made.ledger.counts)).groups.get("ready", 0)


async def has_no_lease(made: Coordinator) -> bool:
    return not await made.call(made.ledger.leased)


async def claim_while_generating(teacher: Teacher, engines: Sequence[SteppedEngine], num_steps: int = 1) -> Batch:
    """Claims a batch; engines take so many steps at a time, and none while answers wait for rewards or the batch may be
    complete. So answers are cut, however slow the machine is; and a group whose last chance this is comes to its end.
    """
    made, claiming = teacher.made, asyncio.create_task(teacher.claim())
    while not claiming.done():
        if await made.call(made.ledger.unscored, 1) or await num_ready(made) >= made.ledger.terms.groups_per_step:
            await asyncio.wait({claiming}, timeout=0.1)
        if not claiming.done():
            for engine in engines:
                engine.steps_left = num_steps
            await asyncio.sleep(0.003)
    for engine in engines:
        engine.steps_left = 0
    return claiming.result()


def play(scenario: Awaitable[Any]) -> Any:
    """Runs a scene to its end, within a time that only a deadlock exceeds."""

    async def within() -> Any:
        async with asyncio.timeout(2 * SOON_S):
            return await scenario

    return asyncio.run(within())
