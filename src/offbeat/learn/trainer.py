"""The trainer's life: claim a batch, train on it, publish the version that came of it, commit, and again.

The work is in the parts; `run` shows the order. A step's version is on disk before its commit makes it known, and a
checkpoint holds what the ledger does not. Whatever is killed in between, a restart claims the same batch for the same
step. A step that meets NaN or infinity, or fails in any other way, ends the run before the update: nothing of the step
is kept, and a checkpoint holds all that was learnt before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from offbeat.crash import crash_here
from offbeat.errors import DeadlineError, OffbeatError, RunStopped, UserError
from offbeat.learn import broken
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.finite import NotFinite
from offbeat.learn.policy import Policy
from offbeat.learn.samples import Sample
from offbeat.learn.step import StepFigures, StepSettings, train_step
from offbeat.learn.witnesses import Witnesses
from offbeat.ledger.records import Batch, ComparedSegment
from offbeat.model.lora import published_tensors
from offbeat.serve.client import TrainerClient
from offbeat.trajectory import Segment, Trajectory
from offbeat.weights.publish import Figures, Publisher
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

MAX_CLAMPED_SHARE = 0.001
"""Of a step's tokens: more log-ratios beyond the clamp are no accident, and the step is not what it seems."""
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
    num_witnesses: int = 0
    """How many versions are kept, so that older tokens can be audited."""
    claim_ahead: bool = False
    """Whether the next step's batch is fetched while a step is trained; pointless where nothing is generated then."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration, to be kept with a batch that a step broke on."""


@dataclass(frozen=True)
class StepReport:
    """A finished step, for whoever watches."""

    step: int
    batch: Batch
    figures: StepFigures
    lr: float
    weights: Figures | None = None
    """What publishing the version that came of it took."""


class Trainer:
    """One policy learning from what a coordinator hands out."""

    def __init__(
        self,
        client: TrainerClient,
        policy: Policy,
        weights: Publisher,
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
        self._witnesses: Witnesses | None = None
        if settings.num_witnesses:
            self._witnesses = Witnesses(weights.folder / "witnesses", settings.num_witnesses)
        self._ahead: asyncio.Future[Batch] | None = None

    async def start(self, *, from_scratch: bool = False) -> int:
        """Takes the run over with the latest checkpoint, or with the model as it was given, and publishes it; returns
        its step. With `from_scratch` there is no checkpoint, and all that the run has trained may be undone."""
        steps = self.checkpoints.steps()
        if steps and from_scratch:
            raise UserError(
                f"--from-scratch: {self.checkpoints.folder} has a checkpoint of step {steps[-1]}; go on from it "
                "without --from-scratch, or remove that folder"
            )
        held_version = None
        if steps:
            manifest, state = await asyncio.to_thread(self.checkpoints.load, steps[-1])
            self.policy.load_state(state)
            self.step, held_version = manifest.step, manifest.version
            self.saved_step = self.step
        home = self.checkpoints.identity()
        reconciled = await self.client.reconcile(self.step, held_version, home=home, from_scratch=from_scratch)
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
            report = await self._to_its_end(self._make_step(batch), stop)
            async with self._between_steps(stop):
                await self.on_step(report)  # first, because a checkpoint would bury a lost row
            if self.settings.checkpoint_every and self.step % self.settings.checkpoint_every == 0:
                await self.save()

    async def _make_step(self, batch: Batch) -> StepReport:
        """Trains on a batch, publishes the version that came of it, and commits."""
        assert self.version is not None
        lr, num_updates = self.settings.learning_rate(self.step), self.policy.num_updates
        with self.span("train"):
            try:
                figures = await asyncio.to_thread(
                    train_step,
                    self.policy,
                    samples_of(batch),
                    self.settings.step,
                    lr,
                    self.reference,
                    self._weights_of,
                )
            except NotFinite as error:
                raise await self._broken(error, batch, lr) from error
            except Exception:  # something is wrong with the batch, or with a loss of the user's own
                if self.policy.num_updates == num_updates:
                    await self._save_start_of_step()
                raise
        self._watch_gap(figures)
        self._watch_clamp(figures)
        with self.span("publish"):
            version = await self._write_version(self.step + 1, self.version.number)
            crash_here("version-written")
            await self.client.commit(
                self.step, version, audited_tasks(batch, figures), compared_segments(batch, figures)
            )
            crash_here("version-committed")
            self.version = version
        self.step += 1
        return StepReport(self.step - 1, batch, figures, lr, self.weights.figures)

    async def _to_its_end(self, step: Coroutine[Any, Any, StepReport], stop: asyncio.Event) -> StepReport:
        """Awaits a step. When another part of the run fails meanwhile, the step is finished all the same, and saved:
        what its thread is doing cannot be stopped, and nothing can be made of half a step."""
        making = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if stop.is_set():  # someone asked twice and will not wait
                making.cancel()
                raise
            while not making.done():
                with suppress(asyncio.CancelledError):  # once for each part that fails after the first
                    await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                await self._save_undisturbed()
            raise

    async def save(self, *, keeps_all: bool = False) -> None:
        if self.saved_step == self.step:
            return
        assert self.version is not None
        with self.span("checkpoint"):
            await asyncio.to_thread(
                self.checkpoints.save, self.step, self.version.number, self.policy.state(), keeps_all=keeps_all
            )
        crash_here("checkpoint-saved")
        self.saved_step = self.step
        self.event("checkpoint", step=self.step, version=self.version.number)
        with suppress(TimeoutError):  # it is told again at the next start
            async with asyncio.timeout(TELL_WITHIN_S):
                await self.client.checkpointed(self.step)

    async def _broken(self, error: NotFinite, batch: Batch, lr: float) -> RunStopped:
        """Keeps the batch that the step broke on, and all that was learnt before it; says what to do.

        After an update of the same step the policy is half a step on, which no checkpoint may hold. Whatever of this
        fails, as on a full disk, the run stops with its first reason.
        """
        assert self.version is not None
        folder = self.checkpoints.folder.parent / "broken"
        task, where = broken.place(error, batch)
        found = broken.Broken(
            format=broken.FORMAT,
            batch=batch,
            version=self.version.number,
            lr=lr,
            tensor=error.tensor,
            sample=error.sample,
            token=error.token,
            num_updates=error.num_updates,
            config=dict(self.settings.config),
        )
        try:
            file = await asyncio.to_thread(broken.save, folder, found, self.version.path)
            kept = f"kept as {file}: offbeat replay {file} says more"
        except OSError as problem:
            file, kept = None, f"could not be kept in {folder}: {problem.strerror}"
        told = {"task": task, "token": error.token, "file": None if file is None else str(file)}
        with suppress(OffbeatError):
            self.event("not_finite", step=self.step, version=self.version.number, tensor=error.tensor, **told)
        if error.num_updates == 0:
            await self._save_start_of_step()
        return RunStopped(
            f"step {self.step}: {error}{f' ({where})' if where else ''}; its batch (step {batch.step}, from version "
            f"{self.version.number}) is {kept}; {self._way_back(error)}"
        )

    async def _save_start_of_step(self) -> None:
        """Saves what was learnt before a step that failed without an update, beside all checkpoints that there are. If
        that fails too, the run ends with its first reason."""
        try:
            await self.save(keeps_all=True)
        except OffbeatError as problem:
            log.warning("step %d: %s", self.step, problem)

    def _way_back(self, error: NotFinite) -> str:
        last = self.saved_step
        if error.num_updates:
            begin = "the start" if last is None else f"the checkpoint of step {last}"
            return f"--resume goes back to {begin}; resume with a smaller optimizer.lr, or look at the data"
        if last != self.step:
            return "resume with a smaller optimizer.lr, or look at the data"
        own: Path = self.checkpoints.folder / f"{last:08d}"
        is_only = self.checkpoints.steps() == [last]
        return (
            "--resume tries the same batch again: mend the data or the loss first, or remove "
            f"{own} and resume from before it{' (--from-scratch)' if is_only else ''} with a smaller optimizer.lr"
        )

    @asynccontextmanager
    async def _between_steps(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Whatever goes wrong inside, here or elsewhere in the run, what was learned so far is saved."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, Exception) or not stop.is_set():  # otherwise someone asked twice and will not wait
                await self._save_undisturbed()
            raise

    async def _save_undisturbed(self) -> None:
        """Saves, however often this is cancelled meanwhile: what fails brings others down, each of which does so."""
        saving = asyncio.ensure_future(self.save())
        while not saving.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(saving)

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
        tensors = published_tensors(self.policy.model)
        version = await asyncio.to_thread(self.weights.write, number, step, parent, tensors)
        if self._witnesses is not None:
            await asyncio.to_thread(self._witnesses.add, version)
        return version

    def _weights_of(self, number: int) -> Path | None:
        """Where the weights of an older version lie; None where they are not kept."""
        return None if self._witnesses is None else self._witnesses.file(number)

    def _watch_gap(self, figures: StepFigures) -> None:
        gap, settings = figures.logprob_gap, self.settings
        if settings.stop_logprob_gap is not None and gap > settings.stop_logprob_gap:
            raise RunStopped(
                f"step {self.step}: engine and trainer disagree by {gap:.3g} on average about fresh tokens, over "
                f"loss.stop_logprob_gap = {settings.stop_logprob_gap}"
            )
        if gap > settings.max_logprob_gap:
            log.warning("step %d: log-prob gap %.3g is over loss.max_logprob_gap", self.step, gap)
            self.event("logprob_gap", step=self.step, gap=gap, limit=settings.max_logprob_gap)

    def _watch_clamp(self, figures: StepFigures) -> None:
        share, is_audited = figures.clamped_share, self.settings.step.max_sample_gap is not None
        if is_audited and share > MAX_CLAMPED_SHARE:  # a paced engine's tokens come from no weights at all
            log.warning("step %d: %.2g of the tokens have a log-ratio beyond the clamp", self.step, share)
            self.event("clamped", step=self.step, share=share, limit=MAX_CLAMPED_SHARE)


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


def compared_segments(batch: Batch, figures: StepFigures) -> list[ComparedSegment]:
    """What an audit found of the batch's segments, by task."""
    tasks = [member.task for group in batch.groups for member in group.members]
    return [ComparedSegment(tasks[i], start, num_tokens, num_off) for i, start, num_tokens, num_off in figures.compared]


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
            staleness=member.staleness,
            sampled=member.trajectory.sampled_mask,
            segment=_per_token(member.trajectory, [segment.start for segment in member.trajectory.segments]),
            version=member.trajectory.versions,
            old_kv=_per_token(member.trajectory, [_has_old_kv(segment) for segment in member.trajectory.segments]),
            rewards=tuple((part.position, part.weight * part.value) for part in member.rewards),
            siblings=group.prompt,
            earlier=group.earlier,
        )
        for group in batch.groups
        for member in group.members
    ]


def _per_token(trajectory: Trajectory, values: Sequence[int | bool]) -> np.ndarray:
    """A value of each segment, given to each of its tokens."""
    return np.repeat(values, [len(segment.tokens) for segment in trajectory.segments])


def _has_old_kv(segment: Segment) -> bool:
    """Whether its tokens attended to keys and values of older weights, so that no weights are quite their own."""
    return segment.version is not None and segment.kv_version is not None and segment.kv_version < segment.version
