"""The training loop: claim a batch, train on it, publish the new version, commit.

`Trainer._train` and `_make_step` show the order; other modules do the work. A version is on disk before the commit that
records it in the ledger, and a checkpoint holds only state that the ledger does not have. So after a kill at any
moment, a restart claims the same batch for the same step. A step that meets NaN or infinity, or fails otherwise, ends
the run; if the step has made no update yet, a checkpoint saves the state before the step.

Checkpoints are written from a snapshot while the next step is made. A version is written in the same way if the next
batch has already been claimed when a step ends. If not, workers are waiting for the version, so the next step waits
until it is written. At most one checkpoint and one version are being written at a time. The ledger sees the same calls
in the same order as without overlap: a batch is claimed after the commit of the step before last, versions are
committed one after the other, and a checkpoint is begun after the commit of its version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from offbeat.client.protocol import TrainerClient
from offbeat.errors import DeadlineError, OffbeatError, RunStopped, UserError
from offbeat.ledger.records import Batch, ComparedSegment
from offbeat.testing.crash_points import crash_here
from offbeat.trainer.audit import Witnesses
from offbeat.trainer.checkpoint import CheckpointManifest, Checkpoints, random_states
from offbeat.trainer.microbatch_size import MicrobatchSize
from offbeat.trainer.not_finite import FailedStep, NotFinite
from offbeat.trainer.packing import samples_of
from offbeat.trainer.policy import Policy
from offbeat.trainer.snapshot import Snapshot
from offbeat.trainer.step import StepMetrics, StepSettings, train_step
from offbeat.weights.publish import Publisher, PublishFigures
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

MAX_CLAMPED_SHARE = 0.001
"""Largest share of a step's tokens that may have a clamped log-ratio without a warning; more cannot be chance."""
REPORT_WITHIN_S = 60.0
"""Seconds for which to try to report a checkpoint to the coordinator."""


@dataclass(frozen=True)
class TrainerSettings:
    num_steps: int
    step: StepSettings
    learning_rate: Callable[[int], float]
    checkpoint_every: int
    claim_within_s: float
    max_logprob_gap: float
    num_witnesses: int = 0
    """Number of versions kept on disk for auditing older tokens."""
    claim_ahead: bool = False
    """Whether to claim the next batch during training; useless if workers generate nothing during training."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Resolved configuration, stored with the dump of a failed step."""


@dataclass(frozen=True)
class StepReport:
    """Report of a finished step. `step` counts from 0; the version with which the step began has the same `step`."""

    step: int
    batch: Batch
    metrics: StepMetrics
    lr: float
    weights: PublishFigures | None = None
    """Bytes and seconds that publishing the latest version took; None: unknown. The latest version is that of this step
    or, while that one is still being written, the version before it."""


class Behind:
    """Runs work in the background while the next step is made, one piece of work at a time. If the work fails, every
    later call of `end` raises its error, which ends the run."""

    def __init__(self, span: Callable[[], AbstractContextManager[object]]):
        """`span` returns a context that measures how long a piece of work takes."""
        self.failed = asyncio.Event()
        self._span = span
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._task is None or self._task.done(), "this is a bug: earlier work is still running"
        self._task = asyncio.create_task(self._do(work))

    async def _do(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            with self._span():
                await work
        except BaseException:
            self.failed.set()
            raise

    async def end(self) -> None:
        """Waits until the work is done. Cancelling this call does not stop the work."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task.result()


class Trainer:
    """Trains one policy on the batches of a coordinator."""

    def __init__(
        self,
        client: TrainerClient,
        policy: Policy,
        weights: Publisher,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        *,
        reference: PreTrainedModel | None,
        size: MicrobatchSize | None = None,
        training: Training | None = None,
        span: Callable[[str], AbstractContextManager[object]],
        event: Callable[..., None],
        on_step: Callable[[StepReport], Awaitable[None]],
    ):
        """`training` are the ranks that train the policy; None: this process does."""
        self.client, self.policy, self.weights, self.checkpoints = client, policy, weights, checkpoints
        self.settings = settings
        size = size or MicrobatchSize(settings.step.tokens_per_microbatch)
        self.training: Training = training or OneRank(policy, reference, settings.step, size, checkpoints)
        self.span, self.event, self.on_step = span, event, on_step
        self.step = 0
        self.saved_step: int | None = None
        self.version: Version | None = None
        self._witnesses: Witnesses | None = None
        if settings.num_witnesses:
            self._witnesses = Witnesses(weights.folder / "witnesses", settings.num_witnesses)
        self._next_claim: asyncio.Future[Batch] | None = None
        self._saving = Behind(lambda: span("checkpoint_behind"))
        self._publishing = Behind(lambda: span("publish_behind"))

    async def start(self, *, from_scratch: bool = False) -> int:
        """Takes over the run from the latest checkpoint, or from the initial model if there is none, and publishes
        these weights; returns the next step, counted from 0. `from_scratch` allows a trainer without a checkpoint to
        undo the whole run, although another trainer may have checkpoints of it."""
        steps = self.checkpoints.steps()
        if steps and from_scratch:
            raise UserError(
                f"--from-scratch: {self.checkpoints.folder} has a checkpoint of step {steps[-1]}; go on from it "
                "without --from-scratch, or remove that folder"
            )
        held_version = None
        if steps:
            manifest = await asyncio.to_thread(self.training.load, steps[-1])
            self.step, held_version = manifest.step, manifest.version
            self.saved_step = self.step
        home = self.checkpoints.identity()
        reconciled = await self.client.reconcile(self.step, held_version, home=home, from_scratch=from_scratch)
        crash_here("reconciled")
        weights = await asyncio.to_thread(self.training.weights)
        self.version = await self._write_version(self.step, reconciled.parent, weights)
        await self.client.publish(self.version)
        if self.saved_step is not None:
            await self.client.checkpointed(self.saved_step)
        if reconciled.parent is not None:
            self.event(
                "resume",
                step=self.step,
                version=self.version.number,
                abandoned=list(reconciled.abandoned_versions),
                undone_steps=[step + 1 for step in reconciled.undone_steps],  # as in the metrics, which count from 1
                reissued_groups=reconciled.num_reissued_groups,
            )
        return self.step

    async def run(self, stop: asyncio.Event) -> None:
        """Trains until the last step or until `stop` is set; ends with a checkpoint either way."""
        try:
            await self._train(stop)
        except BaseException as error:
            await self._let_finish(error)
            raise
        finally:
            if self._next_claim is not None:
                await _discard(self._next_claim)
        await self.save()

    async def _let_finish(self, error: BaseException) -> None:
        """Waits until no version or checkpoint is being written, after the run has failed with `error`. Logs an error
        of this writing unless it is `error` itself."""
        for work in (self._publishing, self._saving):
            try:
                await work.end()
            except OffbeatError as problem:
                if problem is not error:
                    log.warning("%s", problem)

    async def _train(self, stop: asyncio.Event) -> None:
        while self.step < self.settings.num_steps:
            async with self._between_steps(stop):
                with self.span("wait"):
                    batch = await self._claim_unless(stop)
            if batch is None:
                break
            crash_here("batch-claimed")
            report = await self._finish(self._make_step(batch), stop)
            async with self._between_steps(stop):
                await self.on_step(report)  # before the checkpoint, since the steps before one are not repeated
            if self._is_checkpoint_due() and self.step < self.settings.num_steps:
                await self.save(behind=True)

    def _is_checkpoint_due(self) -> bool:
        return self.settings.checkpoint_every > 0 and self.step % self.settings.checkpoint_every == 0

    async def _make_step(self, batch: Batch) -> StepReport:
        """Trains on a batch, publishes the new version, and commits the step at the coordinator; returns its report. If
        the next batch has already been claimed, publishing and committing may continue in the background."""
        assert self.version is not None
        lr, num_updates = self.settings.learning_rate(self.step), self.training.num_updates
        with self.span("train"):
            try:
                metrics = await asyncio.to_thread(self.training.train, batch, lr, self._weights_of)
            except NotFinite as error:
                raise await self._stop_for(error, batch, lr) from error
            except Exception:  # a bad batch, or an error in a user's loss
                if self.training.num_updates == num_updates:
                    await self._save_start_of_step()
                raise
        self._watch(metrics)
        with self.span("publish"):
            await self._publishing.end()
            self.step += 1
            weights, copied = await asyncio.to_thread(self.training.weights), None
            if self._is_next_batch_here() and not self._is_checkpoint_due():  # a checkpoint has to name its version
                copied = await asyncio.to_thread(self.training.copied, weights)
            if copied is None:
                await self._publish(batch, metrics, weights)
            else:
                self._publishing.begin(self._publish(batch, metrics, copied))
        return StepReport(batch.step, batch, metrics, lr, self.weights.figures)

    def _is_next_batch_here(self) -> bool:
        claim = self._next_claim
        return claim is not None and claim.done() and not claim.cancelled() and claim.exception() is None

    async def _publish(self, batch: Batch, metrics: StepMetrics, weights: Mapping[str, Tensor]) -> None:
        """Writes the version that training on `batch` has led to, and commits the step."""
        assert self.version is not None
        version = await self._write_version(batch.step + 1, self.version.number, weights)
        crash_here("version-written")
        tasks = [member.task for group in batch.groups for member in group.members]
        compared = [ComparedSegment(tasks[i], *segment) for i, *segment in metrics.compared]
        await self.client.commit(batch.step, version, [tasks[i] for i in metrics.left_out], compared)
        crash_here("version-committed")
        self.version = version

    async def _finish(self, step: Coroutine[Any, Any, StepReport], stop: asyncio.Event) -> StepReport:
        """Awaits `step`, a call of `_make_step`. If another part of the run fails meanwhile, the step is still finished
        and saved, because its thread cannot be stopped and half a step is useless."""
        making = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if stop.is_set():  # the user asked to stop twice
                making.cancel()
                raise
            while not making.done():
                with suppress(asyncio.CancelledError):  # one for each further part that fails
                    await asyncio.wait({making})
            if not making.cancelled() and making.exception() is None:
                await self._save_undisturbed()
            raise

    async def save(self, *, behind: bool = False, keeps_all: bool = False) -> None:
        """Saves a checkpoint, unless there is one of this step. With `behind`, returns as soon as the state is copied,
        if the host's memory suffices for a copy. With `keeps_all`, deletes no older checkpoint."""
        with self.span("checkpoint"):
            await self._publishing.end()
            await self._saving.end()
            if self.saved_step == self.step:
                return
            assert self.version is not None
            assert self.version.step == self.step, "this is a bug: weights must be published before they are saved"
            save, is_copied = await asyncio.to_thread(self.training.begin_save, self.step, self.version.number)
            crash_here("snapshot-taken")
            writing = self._write_checkpoint(self.version, save, keeps_all=keeps_all)
            if behind and is_copied:
                self._saving.begin(writing)
            else:
                await writing

    async def _write_checkpoint(self, version: Version, save: Save, *, keeps_all: bool) -> None:
        await asyncio.to_thread(save, keeps_all=keeps_all)
        crash_here("checkpoint-saved")
        self.saved_step = version.step
        self.event("checkpoint", step=version.step, version=version.number)
        with suppress(TimeoutError):  # reported again at the next start
            async with asyncio.timeout(REPORT_WITHIN_S):
                await self.client.checkpointed(version.step)

    async def _stop_for(self, error: NotFinite, batch: Batch, lr: float) -> RunStopped:
        """Handles NaN or infinity: dumps the batch, saves the state before the step, and returns the error that ends
        the run.

        If the step has already made an update, the policy is between two steps and no checkpoint is saved. If the dump
        or the checkpoint fails too, as on a full disk, the run still stops with `error` as its reason.
        """
        await self._publishing.end()
        assert self.version is not None
        failed = FailedStep(self.step, error, batch, self.version, lr, dict(self.settings.config))
        await asyncio.to_thread(failed.dump, self.checkpoints.folder.parent / "broken")
        with suppress(OffbeatError):
            self.event("not_finite", **failed.event())
        if error.num_updates == 0:
            await self._save_start_of_step()
        return RunStopped(failed.message(self.saved_step, self.checkpoints))

    async def _save_start_of_step(self) -> None:
        """Saves the state before a step that failed without an update, and keeps all older checkpoints. A failure to
        save is only logged, so that the run ends with the step's error."""
        try:
            await self.save(keeps_all=True)
        except OffbeatError as problem:
            log.warning(
                "the state with which the failed step began (checkpoint of step %d) cannot be saved: %s",
                self.step,
                problem,
            )

    @asynccontextmanager
    async def _between_steps(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Saves a checkpoint if the `async with` block raises, or is cancelled by a failure elsewhere in the run."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, Exception) or not stop.is_set():  # otherwise the user asked to stop twice
                await self._save_undisturbed()
            raise

    async def _save_undisturbed(self) -> None:
        """Saves a checkpoint and ignores cancellations until it is saved; each part of the run that fails sends one."""
        saving = asyncio.ensure_future(self.save())
        while not saving.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(saving)

    async def _claim_unless(self, stop: asyncio.Event) -> Batch | None:
        """Waits for the next step's batch and returns it; None if `stop` is set, or a checkpoint cannot be written,
        before the batch is there."""
        ending = (stop, self._saving.failed)
        if any(event.is_set() for event in ending):
            return None
        claim, self._next_claim = self._next_claim, None
        if claim is None or (claim.done() and isinstance(claim.exception(), DeadlineError)):
            claim = self._claim(self.step)  # a claim made ahead may have spent its deadline during training
        ended: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in ending]
        try:
            await asyncio.wait([claim, *ended], return_when=asyncio.FIRST_COMPLETED)
            batch = claim.result() if claim.done() else None
        finally:
            for waiting in ended:
                waiting.cancel()
            await _discard(claim)
        if batch is not None and self.settings.claim_ahead and self.step + 1 < self.settings.num_steps:
            self._next_claim = self._claim(self.step + 1)
        return batch

    def _claim(self, step: int) -> asyncio.Future[Batch]:
        async def claim() -> Batch:
            await self._publishing.end()  # the ledger refuses a claim that is two steps ahead of its versions
            return await self.client.claim(step, self.settings.claim_within_s)

        return asyncio.ensure_future(claim())

    async def _write_version(self, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        number = await self.client.next_version()
        version = await asyncio.to_thread(self.weights.write, number, step, parent, tensors)
        if self._witnesses is not None:
            await asyncio.to_thread(self._witnesses.add, version)
        return version

    def _weights_of(self, number: int) -> Path | None:
        """Returns the weights file of an older version; None if it is not kept."""
        return None if self._witnesses is None else self._witnesses.file(number)

    def _watch(self, metrics: StepMetrics) -> None:
        """Warns if the log-probs of engine and trainer are too far apart."""
        gap, share, settings = metrics.logprob_gap, metrics.clamped_share, self.settings
        number = self.step + 1  # as in the metrics, which count from 1
        if gap > settings.max_logprob_gap:
            log.warning(
                "step %d: the log-probs of engine and trainer differ by %.3g on average for tokens of the latest "
                "version, more than loss.max_logprob_gap allows; compare model.dtype with the engine's dtype",
                number,
                gap,
            )
            self.event("logprob_gap", step=number, gap=gap, limit=settings.max_logprob_gap)

        is_audited = settings.step.max_sample_gap is not None  # if not (paced engine), tokens come from no weights
        if is_audited and share > MAX_CLAMPED_SHARE:
            log.warning(
                "step %d: the log-probs of %.2g %% of the tokens have changed so much since sampling, or within the "
                "step, that their log-ratio is clamped; lower optimizer.lr",
                number,
                100 * share,
            )
            self.event("clamped", step=number, share=share, limit=MAX_CLAMPED_SHARE)


async def _discard(claim: asyncio.Future[Batch]) -> None:
    """Cancels a claim that is no longer needed and retrieves its error, which asyncio would otherwise report."""
    claim.cancel()
    await asyncio.wait({claim})
    if not claim.cancelled():
        claim.exception()


Save = Callable[..., Path]
"""Writes a checkpoint whose state was taken before; with `keeps_all`, deletes no older one."""


class Training(Protocol):
    """The ranks that train a policy, as the trainer's loop sees them."""

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates begun since the start of this process."""
        ...

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        """Trains on a batch; see `offbeat.trainer.step.train_step`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the tensors of the next version, which training may change."""
        ...

    def copied(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Returns these tensors as copies that training does not change; None if there is no memory for them."""
        ...

    def begin_save(self, step: int, version: int) -> tuple[Save, bool]:
        """Takes the state for a checkpoint. Returns a function that writes the checkpoint, and whether training may go
        on meanwhile."""
        ...

    def load(self, step: int) -> CheckpointManifest:
        """Goes back to the checkpoint of `step`, and returns its manifest."""
        ...


class OneRank:
    """A policy that one process trains."""

    def __init__(
        self,
        policy: Policy,
        reference: PreTrainedModel | None,
        settings: StepSettings,
        size: MicrobatchSize,
        checkpoints: Checkpoints,
    ):
        self.policy, self.reference, self.settings, self.size = policy, reference, settings, size
        self.checkpoints = checkpoints
        self._state, self._weights = Snapshot("a checkpoint"), Snapshot("a version")

    @property
    def num_updates(self) -> int:
        return self.policy.num_updates

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        return train_step(self.policy, samples_of(batch), self.settings, lr, self.reference, weights_of, self.size)

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.published

    def copied(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return self._weights.take(weights)

    def begin_save(self, step: int, version: int) -> tuple[Save, bool]:
        state = {**self.policy.state(), **random_states()}
        copied = self._state.take(state)
        return partial(self.checkpoints.save, step, version, state if copied is None else copied), copied is not None

    def load(self, step: int) -> CheckpointManifest:
        manifest, state = self.checkpoints.load(step)
        self.policy.load_state(state)
        return manifest
