"""The trainer's life: claim a batch, train on it, publish the version that came of it, commit, and again.

The work is in the parts; `run` shows the order. A step's version is on disk before its commit makes it known, and a
checkpoint holds what the ledger does not. Whatever is killed in between, a restart claims the same batch for the same
step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from offbeat.crash import crash_here
from offbeat.errors import DeadlineError, RunStopped
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.policy import Policy
from offbeat.learn.samples import Sample
from offbeat.learn.step import StepFigures, StepSettings, train_step
from offbeat.ledger.records import Batch
from offbeat.model.loading import state_tensors
from offbeat.serve.client import TrainerClient
from offbeat.weights.store import WeightStore
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

TELL_WITHIN_S = 60.0
"""How long a trainer that has saved everything looks for a coordinator to tell."""


@dataclass(frozen=True)
class TrainerSettings:
    num_steps: int
    step: StepSettings
    learning_rate: Callable[[int], float]
    checkpoint_every: int
    claim_within_s: float
    max_logprob_gap: float
    stop_logprob_gap: float | None = None
    claim_ahead: bool = False
    """Whether the next step's batch is fetched while a step is trained; pointless where nothing is generated then."""


@dataclass(frozen=True)
class StepReport:
    """A finished step, for whoever watches."""

    step: int
    batch: Batch
    figures: StepFigures
    lr: float


class Trainer:
    """One policy learning from what a coordinator hands out."""

    def __init__(
        self,
        client: TrainerClient,
        policy: Policy,
        weights: WeightStore,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        *,
        reference: PreTrainedModel | None,
        span: Callable[[str], AbstractContextManager[object]],
        event: Callable[..., None],
        on_step: Callable[[StepReport], Awaitable[None]],
    ):
        self.client, self.policy, self.weights, self.checkpoints = client, policy, weights, checkpoints
        self.settings, self.reference = settings, reference
        self.span, self.event, self.on_step = span, event, on_step
        self.step = 0
        self.saved_step: int | None = None
        self.version: Version | None = None
        self._ahead: asyncio.Future[Batch] | None = None

    async def start(self) -> int:
        """Takes up the latest checkpoint, or the model as it was given, and publishes it; returns its step."""
        steps = self.checkpoints.steps()
        held_version = None
        if steps:
            manifest, state = await asyncio.to_thread(self.checkpoints.load, steps[-1])
            self.policy.load_state(state)
            self.step, held_version = manifest.step, manifest.version
            self.saved_step = self.step
        reconciled = await self.client.reconcile(self.step, held_version)
        crash_here("reconciled")
        self.version = await self._write_version(self.step, reconciled.parent)
        await self.client.publish(self.version)
        if self.saved_step is not None:
            await self.client.checkpointed(self.saved_step)
        if reconciled.parent is not None:
            self.event(
                "resume",
                step=self.step,
                version=self.version.number,
                abandoned=list(reconciled.abandoned_versions),
                undone_steps=list(reconciled.undone_steps),
                reissued_groups=reconciled.num_reissued_groups,
            )
        return self.step

    async def run(self, stop: asyncio.Event) -> None:
        """Trains until the last step, or until told to stop; ends with a checkpoint either way."""
        try:
            await self._train(stop)
        finally:
            if self._ahead is not None:
                await _forget(self._ahead)
        await self.save()

    async def _train(self, stop: asyncio.Event) -> None:
        while self.step < self.settings.num_steps:
            async with self._between_steps(stop):
                with self.span("wait"):
                    batch = await self._claim_unless(stop)
            if batch is None:
                break
            crash_here("batch-claimed")
            lr = self.settings.learning_rate(self.step)
            with self.span("train"):
                samples = samples_of(batch)
                figures = await asyncio.to_thread(
                    train_step, self.policy, samples, self.settings.step, lr, self.reference
                )
            self._watch_gap(figures)
            with self.span("publish"):
                assert self.version is not None
                version = await self._write_version(self.step + 1, self.version.number)
                crash_here("version-written")
                await self.client.commit(self.step, version, audited_tasks(batch, figures))
                crash_here("version-committed")
                self.version = version
            self.step += 1
            async with self._between_steps(stop):
                # First, because a checkpoint would bury a lost row.
                await self.on_step(StepReport(self.step - 1, batch, figures, lr))
            if self.settings.checkpoint_every and self.step % self.settings.checkpoint_every == 0:
                await self.save()

    async def save(self) -> None:
        if self.saved_step == self.step:
            return
        assert self.version is not None
        with self.span("checkpoint"):
            await asyncio.to_thread(self.checkpoints.save, self.step, self.version.number, self.policy.state())
        crash_here("checkpoint-saved")
        self.saved_step = self.step
        self.event("checkpoint", step=self.step, version=self.version.number)
        with suppress(TimeoutError):  # it is told again at the next start
            async with asyncio.timeout(TELL_WITHIN_S):
                await self.client.checkpointed(self.step)

    @asynccontextmanager
    async def _between_steps(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Whatever goes wrong inside, here or elsewhere in the run, what was learned so far is saved."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, Exception) or not stop.is_set():  # otherwise someone asked twice and will not wait
                saving = asyncio.ensure_future(self.save())
                while not saving.done():
                    with suppress(asyncio.CancelledError):  # what fails brings others down, which cancels us once more
                        await asyncio.shield(saving)
            raise

    async def _claim_unless(self, stop: asyncio.Event) -> Batch | None:
        """The step's batch, or None when the run is to stop while it waits."""
        if stop.is_set():
            return None
        claim, self._ahead = self._ahead, None
        if claim is None or (claim.done() and isinstance(claim.exception(), DeadlineError)):
            claim = self._claim(self.step)  # the time that training took is not to be counted as waiting
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        waited: set[asyncio.Future[Any]] = {claim, stopped}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            batch = claim.result() if claim.done() else None
        finally:
            stopped.cancel()
            await _forget(claim)
        if batch is not None and self.settings.claim_ahead and self.step + 1 < self.settings.num_steps:
            self._ahead = self._claim(self.step + 1)
        return batch

    def _claim(self, step: int) -> asyncio.Future[Batch]:
        return asyncio.ensure_future(self.client.claim(step, self.settings.claim_within_s))

    async def _write_version(self, step: int, parent: int | None) -> Version:
        number = await self.client.next_version()
        tensors = state_tensors(self.policy.model)
        return await asyncio.to_thread(self.weights.write, number, step, parent, tensors)

    def _watch_gap(self, figures: StepFigures) -> None:
        gap, settings = figures.logprob_gap, self.settings
        if not np.isfinite(figures.loss) or not np.isfinite(figures.grad_norm):
            raise RunStopped(
                f"step {self.step}: loss {figures.loss} with gradient norm {figures.grad_norm} is not finite; "
                "resume from the last checkpoint with a smaller optimizer.lr"
            )
        if settings.stop_logprob_gap is not None and gap > settings.stop_logprob_gap:
            raise RunStopped(
                f"step {self.step}: engine and trainer disagree by {gap:.3g} on average about fresh tokens, over "
                f"loss.stop_logprob_gap = {settings.stop_logprob_gap}"
            )
        if gap > settings.max_logprob_gap:
            log.warning("step %d: log-prob gap %.3g is over loss.max_logprob_gap", self.step, gap)
            self.event("logprob_gap", step=self.step, gap=gap, limit=settings.max_logprob_gap)


async def _forget(claim: asyncio.Future[Batch]) -> None:
    """Ends a claim that nobody waits for any more, and looks at its error, whether or not anyone hears of it."""
    claim.cancel()
    await asyncio.wait({claim})
    if not claim.cancelled():
        claim.exception()


def audited_tasks(batch: Batch, figures: StepFigures) -> list[int]:
    """The tasks whose samples were left out."""
    tasks = [member.task for group in batch.groups for member in group.members]
    return [tasks[i] for i in figures.audited]


def samples_of(batch: Batch) -> Sequence[Sample]:
    """A batch as learning sees it, in the order in which it was claimed."""
    return [
        Sample(
            group=group.group,
            prompt=member.trajectory.prompt,
            response=member.trajectory.tokens,
            logprobs=member.trajectory.logprobs,
            mask=member.mask,
            reward=member.reward,
            fresh=member.staleness == 0,
        )
        for group in batch.groups
        for member in group.members
    ]
