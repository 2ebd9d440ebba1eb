"""The coordinator: leases tasks, accepts trajectories, has them scored, and gives the trainer its batches.

This module connects workers, trainer, ledger and judges (which compute rewards); the decisions are made in `rules`. All
essential state is in the ledger, so the coordinator may be killed at any moment and restarted: remote workers that kept
running still hold their leases. A call that changes the ledger is answered only after the commit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.coordinator.admission import Drawing, Issuer
from offbeat.coordinator.busy_times import BusyTimes, OnSpan
from offbeat.coordinator.lease_manager import LeaseManager
from offbeat.coordinator.maintenance import LedgerMaintenance, MaintenanceSettings, WeightGarbageCollector
from offbeat.coordinator.relays import RelayAssignment
from offbeat.coordinator.reward_queue import RewardQueue
from offbeat.coordinator.writer import Writer
from offbeat.errors import DeadlineError, RunInterrupted, RunOver, RunStopped, UserError
from offbeat.ledger.errors import (
    ENVIRONMENT,
    FAILURE_KINDS,
    LOST_ENVIRONMENT,
    Conflict,
    Fenced,
    Forbidden,
    Refused,
    Unknown,
)
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival, Batch, ComparedSegment, EvalRound, Outcome, Reconciled, Submission
from offbeat.ledger.workers import PRESENT_S, WorkerState
from offbeat.rules.groups import AdmissionTarget
from offbeat.rules.over_provision import Decision, provisioning_of
from offbeat.rules.presence import Presence
from offbeat.rules.quarantine import ASIDE_S, OFF_GAP, Fitness, is_believable
from offbeat.rules.rounds import RoundMembers
from offbeat.rules.step_times import StepTimes
from offbeat.testing.crash_points import crash_here
from offbeat.trajectory import Task, Trajectory
from offbeat.waiting import BackgroundTasks, Notifier
from offbeat.weights.version import Version


class PartialCounters:
    """Counts, since the last `take`, the partials (unfinished trajectories) that were handed back, their tokens, and
    the tokens of tasks that were leased with a partial to continue."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("partials", "partial_tokens", "resumed_tokens"), 0)

    def handed_back(self, partial: Trajectory) -> None:
        self._counts["partials"] += 1
        self._counts["partial_tokens"] += partial.num_tokens

    def handed_out(self, tasks: Iterable[Task]) -> None:
        """Counts, for each task that continues a partial, the tokens of its prompt and of the partial: an engine must
        prefill them again."""
        resumed = [len(task.prompt) + task.prefix.num_tokens for task in tasks if task.prefix is not None]
        self._counts["resumed_tokens"] += sum(resumed)

    def take(self) -> dict[str, int]:
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken


class CurrentRound:
    """The current round and its workers, for runs in which generation stops when a batch is complete.

    A round is the generation of one batch. It begins with a new weight version, by whose number it is named, and ends
    when the trainer claims the batch. Rounds are read from the ledger, so a restart does not change them. Which workers
    took part is kept in memory only. `read` runs a read-only ledger call on the writer thread. An error in the future
    `failure` ends all waits of `is_over`, which then raises this error.
    """

    def __init__(
        self, ledger: Ledger, read: Callable[[Callable[[], Any]], Awaitable[Any]], failure: asyncio.Future[Any]
    ):
        self._ledger, self._read = ledger, read
        self._changes = Notifier(failure)
        self.members = RoundMembers(in_rounds=ledger.terms.in_rounds)

    def notify(self) -> None:
        """Wakes the callers of `is_over`, because a round may have begun or ended."""
        self._changes.notify()

    async def current(self) -> int | None:
        """Returns the version that began the current round; None between rounds, and in a run without rounds."""
        return await self._read(self._ledger.current_round) if self._ledger.terms.in_rounds else None

    async def is_over(self, number: int, wait_s: float) -> bool:
        """Waits up to `wait_s` for round `number` to end; returns whether it is over."""

        async def check() -> bool | None:
            return await self.current() != number or None

        return bool(await self._changes.first(check, time.monotonic() + wait_s))


P = ParamSpec("P")
R = TypeVar("R")

CALLER_ERRORS = (Conflict, Fenced, Forbidden, Refused, Unknown)
"""Errors caused by the caller and not by the coordinator."""
FORGET_AFTER_S = 3600.0
"""Seconds without a call after which the coordinator deletes what it remembers of a worker. If twice the lease time is
longer, it waits for that long, so that the worker's tasks have been taken back by then. A worker that returns later is
treated as new and loses nothing."""
FORGET_EVERY_S = 60.0
REFUSED_EVERY_S = 1.0
"""Seconds between two checks for workers that another process has revoked."""


@dataclass(frozen=True)
class Activity:
    """Snapshot of what a run is doing, for the console."""

    num_answers: int
    """Number of answers that are stored for the next batch, with or without a reward; at most `num_wanted`."""
    num_wanted: int
    """Number of answers in a complete batch."""
    num_eval_answers: int
    """Number of answers that are stored for the evaluation in progress."""
    num_eval_wanted: int
    """Number of answers that the evaluation in progress needs in all; 0: none is in progress."""
    num_workers: int
    has_version: bool
    """Whether the trainer has published weights."""
    is_training: bool


@dataclass(frozen=True)
class CoordinatorSettings:
    """Settings of a run's coordinator. Groups per step and max staleness are in `LedgerTerms`."""

    num_steps: int
    overlap: bool = False
    """Whether workers keep generating while the trainer trains."""
    over_provision: float | Literal["auto"] = 1.0
    """Over-provision factor. With "auto", the coordinator chooses it during the run: with `overlap` by the trainer's
    idle time, otherwise by the measured speed of rounds."""
    max_new_tokens: int = 1
    lease_ttl_s: float = 60.0
    keep: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    vocab_size: int | None = None
    """A trajectory with a token id of this number or above is refused; None: token ids are not checked."""


class Coordinator:
    """Serves workers and a trainer from one ledger. Clients in the same process use `offbeat.client.in_process`."""

    def __init__(
        self,
        ledger: Ledger,
        issuer: Issuer,
        rewards: RewardQueue,
        settings: CoordinatorSettings,
        garbage: WeightGarbageCollector | None = None,
        on_report: Callable[[Mapping[str, Any]], None] = lambda row: None,
        on_claim: Callable[[Batch], None] = lambda batch: None,
    ):
        self.ledger, self.issuer, self.rewards, self.settings = ledger, issuer, rewards, settings
        self.on_report, self.on_claim = on_report, on_claim
        assert ledger.terms.groups_per_step is not None
        self._groups_per_step: int = ledger.terms.groups_per_step
        self._in_order = ledger.terms.max_staleness == 0
        """Whether max_staleness is 0. If so, training tasks require the version of their step, and a batch takes groups
        in the order in which they were drawn."""

        self._background = BackgroundTasks()
        failure = self._background.failure
        self._writer = Writer(ledger, self._background.fail)  # or callers would retry for ever and hide the cause
        self._share = self._writer.call
        self._progress, self._work, self._versions = Notifier(failure), Notifier(failure), Notifier(failure)
        """Wake callers that wait: `_progress` for batches, evaluations and checkpoints; `_work` for tasks; `_versions`
        for versions."""

        self.times, self._partials = StepTimes(), PartialCounters()
        self.busy = BusyTimes("generate")
        self._worked: set[str] = set()
        """Workers that were given tasks since the last report of a step."""
        self._provisioning = provisioning_of(
            settings.over_provision, ledger.terms.max_staleness, self._report_choice, overlaps=settings.overlap
        )
        target = AdmissionTarget(self._groups_per_step, settings.num_steps)
        self._drawing = Drawing(
            ledger, issuer, self._share, target, lambda row: self.on_report(row), requires_version=self._in_order
        )
        self.rounds = CurrentRound(ledger, self._writer.read, failure)

        self.presence, self.relays, self.fitness = Presence(), RelayAssignment(), Fitness()
        self.lease_manager = LeaseManager(
            ledger,
            self._writer,
            self.presence,
            settings.lease_ttl_s,
            settings.max_new_tokens,
            self._notify_all,
            self.fitness.forget,
            self._set_aside_hoarder,
        )

        self._garbage = garbage or WeightGarbageCollector(None)
        self._maintenance = LedgerMaintenance(ledger, settings.keep, self.call, lambda row: self.on_report(row))
        self.seen: dict[str, float] = {}
        """Wall time of the latest call over HTTP, by name of the worker, judge or trainer that made the call."""
        self.only_worker = ""
        """Name of the only worker of a single-process run; the run stops if this worker is set aside. "": the run may
        have several workers."""
        self._is_over, self._interrupted = False, ""
        self._checkpointed_step = -1
        self._newest: int | None = None
        """Number of the version that was announced last; None before the first."""

    def _report_choice(self, decision: Decision) -> None:
        self.on_report({"event": "over_provision", "factor": decision.factor, "why": decision.reason})

    def record_spans(self, on_span: OnSpan) -> None:
        """Makes `on_span` receive, from now on, the spans in which workers generate and judges compute rewards."""
        self.busy.on_span = self.rewards.busy.on_span = on_span

    def _settle_busy_times(self) -> None:
        self.busy.settle({_track(lease.worker) for lease in self.lease_manager.leases.all()})
        self.rewards.settle_busy_times()

    async def activity(self) -> Activity:
        found = await self._writer.read(self.ledger.answers_in_hand)
        num_wanted = self._groups_per_step * self.issuer.group_size
        return Activity(
            num_answers=min(found.num_train, num_wanted),
            num_wanted=num_wanted,
            num_eval_answers=found.num_eval,
            num_eval_wanted=found.num_eval_wanted,
            num_workers=len(self._present_workers()),
            has_version=self._newest is not None,
            is_training=self.times.is_training,
        )

    def _present_workers(self) -> list[str]:
        return self.presence.present(max(self.settings.lease_ttl_s, PRESENT_S))

    async def start(self, *, keep_leases: bool = False) -> None:
        """Starts the background tasks, such as the scoring of trajectories that still wait for a reward. With
        `keep_leases`, renews all stored leases, because remote workers survive a restart; otherwise releases them."""
        await self.lease_manager.start(keep_leases=keep_leases)
        self.rewards.start(self.ledger, self._share, self._background, self._progress, self._notify_workers)
        self._background.spawn(self.lease_manager.expire())
        self._background.spawn(self._forget_for_ever())
        self._background.spawn(self._let_refused_leave())

    async def close(self) -> None:
        await self._background.close()
        self._settle_busy_times()
        await self._writer.close()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a ledger call, which may take long, on the writer thread; other calls do not share its transaction."""
        return await self._writer.alone(function, *args, **kwargs)

    # --- workers ---

    async def lease(self, worker: str, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        deadline_s, ttl_s = time.monotonic() + wait_s, self.settings.lease_ttl_s
        while True:
            changed = self._work.changed
            if self._is_over:
                return LeaseResponse(ttl_s=ttl_s, is_over=True, interrupted=self._interrupted)
            if aside_s := self.fitness.aside_s(worker):
                until_s = min(deadline_s, time.monotonic() + aside_s)
                if not await self._work.wait(changed, until_s) and until_s == deadline_s:
                    left_s = self.fitness.aside_s(worker)
                    why = self.fitness.aside().get(worker, "this pause has just ended")
                    return LeaseResponse(
                        ttl_s=ttl_s,
                        idle=f"the coordinator gives this worker no tasks for another {left_s:.0f} s: {why}",
                    )
                continue
            self.presence.hear(worker, capacity)
            try:
                await self._drawing.draw(self._provisioning.factor())
            except (UserError, RunStopped) as error:  # a source is at fault, which no other worker could mend
                self._background.fail(error)
                raise
            number = await self.rounds.current()
            tasks = await asyncio.shield(self._hand_out(worker, capacity, have_version, number))
            if tasks:
                return LeaseResponse(tuple(tasks), ttl_s=ttl_s, round=number)
            version = await self._version_to_serve()
            if version is not None and version.number != have_version:
                return LeaseResponse(version=version, ttl_s=ttl_s)
            if not await self._work.wait(changed, deadline_s):
                return LeaseResponse(ttl_s=ttl_s, idle=await self._why_idle(version))

    async def _why_idle(self, version: Version | None) -> str:
        """Returns why there is no task for a worker that already has `version`, the version to serve (None: no version
        is published yet)."""
        if version is None:
            return "the trainer has published no weights yet"
        if await self._writer.read(self.ledger.num_leased):
            return "all tasks that may run now are with other workers"
        return f"enough answers are generated for now; the trainer is at step {version.step + 1}"

    async def _hand_out(
        self, worker: str, capacity: int, have_version: int | None, round_number: int | None
    ) -> list[Task]:
        """Leases tasks to a worker and sets the leases' deadlines. Callers shield this method from cancellation:
        otherwise leases could be stored without a deadline and never expire."""
        ttl_s = self.settings.lease_ttl_s
        ask = partial(
            self.ledger.lease,
            worker,
            capacity,
            have_version,
            total_slots=self.presence.total_slots(ttl_s),
            only_eval=not self.rounds.members.may_join(worker, round_number, have_version),
        )
        has_failed = self.fitness.has_failed(worker)
        tasks = await self._share(ask, skips_failed=has_failed)
        if has_failed and not tasks and not self.presence.others(worker, ttl_s):
            tasks = await self._share(ask)  # no other worker could take them
        self.lease_manager.granted(worker, tasks)
        if tasks:
            self.times.leased()
            self.busy.got_work(_track(worker))
            self._worked.add(worker)
            self._partials.handed_out(tasks)
            self._provisioning.handed_out(requires_version=any(task.require_version is not None for task in tasks))
        if any(task.require_version is None for task in tasks):
            self.rounds.members.joined(worker, round_number, have_version)
        if any(task.require_version not in (None, self._newest) for task in tasks):
            self._versions.notify()  # an older version is being evaluated: other workers may load the newest
        return tasks

    def _notify_workers(self) -> None:
        """Wakes callers of `lease` that wait for tasks: there may be new tasks, or room for more groups."""
        self._drawing.check_again()
        self._work.notify()

    def _notify_all(self) -> None:
        self._progress.notify()
        self._notify_workers()

    async def heartbeat(
        self,
        worker: str,
        held: Sequence[tuple[int, int]],
        life: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Heartbeat:
        self.presence.hear(worker)
        self.relays.hear(worker)
        if figures is not None:
            self.presence.figures[worker] = figures
        return await self.lease_manager.heartbeat(worker, held, life)

    async def submit(self, worker: str, trajectory: Trajectory, fence: int) -> Outcome:
        self._check_tokens(trajectory)
        try:
            outcome = await self._writer.submit(Submission(trajectory, worker, fence))
        except CALLER_ERRORS:
            raise
        except Exception as error:
            self._background.fail(error)
            raise
        crash_here("submission-stored")
        self.lease_manager.handed_in(worker, trajectory, fence, is_new=outcome is not Outcome.REPEATED)
        self.fitness.succeeded(worker)
        self.times.submitted()
        self.busy.answered(_track(worker))
        if outcome is not Outcome.REPEATED and not trajectory.is_partial:
            self._provisioning.ended(trajectory.num_tokens)
        if outcome is Outcome.STORED:
            self.rewards.arrived()
            if self.lease_manager.cleared(trajectory.task):
                self._work.notify()
        elif outcome is Outcome.PARTIAL:
            self._partials.handed_back(trajectory)
            self._notify_workers()
        return outcome

    def _check_tokens(self, trajectory: Trajectory) -> None:
        size = self.settings.vocab_size
        highest = max((int(segment.tokens.max()) for segment in trajectory.segments), default=0)
        if size is not None and highest >= size:
            raise Refused(
                f"trajectory of task {trajectory.task}: token id {highest} is not below the vocabulary size {size} of "
                "the run's model; let the worker's engine serve this model"
            )

    async def fail(self, worker: str, task: int, fence: int, reason: str) -> None:
        """Records that a worker failed a task; the failure counts against the worker and against the task. A worker
        with too many failures is set aside: it gets no tasks for a while, and failures that it reports meanwhile do not
        count."""
        kind, colon, rest = reason.partition(": ")
        kind, detail = (kind, rest) if colon and kind in FAILURE_KINDS else ("engine", reason)
        counts = not self.fitness.aside_s(worker) and kind != LOST_ENVIRONMENT
        await self._share(self.ledger.fail, worker, task, fence, kind, detail, counts=counts)
        if kind == ENVIRONMENT:
            self.rewards.scorer.failed(reason)
        else:
            self.rewards.scorer.num_failed += kind != LOST_ENVIRONMENT
        self.lease_manager.failed(worker, task)
        if counts and kind != ENVIRONMENT and (why := self.fitness.failed(worker, task, reason)):
            await self._record_set_aside(worker, why)
        self._notify_all()

    async def _set_aside_hoarder(self, worker: str, why: str) -> None:
        self.fitness.set_aside(worker, why)
        await self._record_set_aside(worker, why)

    async def _record_set_aside(self, worker: str, why: str) -> None:
        await self._share(self.ledger.set_aside, worker, why, ASIDE_S)
        self.presence.set_aside(worker)
        self.on_report({"event": "set_aside", "worker": worker, "seconds": ASIDE_S, "why": why})

    async def give_back(self, worker: str, leases: Sequence[tuple[int, int]]) -> None:
        if await self.lease_manager.give_back(worker, leases):
            self._notify_workers()

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        async def check() -> Version | None:
            version = await self._version_to_serve()
            if version is not None and version.number != have_version:
                return version
            if self._is_over:  # a busy worker makes no other call that would tell it
                raise RunInterrupted(self._interrupted) if self._interrupted else RunOver("the run is over")
            return None

        return await self._versions.first(check, time.monotonic() + wait_s)

    async def leave(self, worker: str) -> None:
        await self.lease_manager.leave(worker)
        self._forget(worker)
        self.rewards.leave(worker)
        self._notify_workers()

    def _forget(self, worker: str) -> None:
        self.fitness.forget(worker)
        self.lease_manager.pace.forget(worker)
        self.presence.left(worker)
        self.rounds.members.left(worker)
        self.relays.leave(worker)
        self.busy.left(_track(worker))
        self._worked.discard(worker)

    def forget_silent(self) -> None:
        """Forgets workers and judges that vanished long ago, so that their records do not fill the memory."""
        for worker in self.presence.silent(max(FORGET_AFTER_S, 2 * self.settings.lease_ttl_s)):
            self._forget(worker)
        self.rewards.forget_silent()

    async def _forget_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            self.forget_silent()

    async def _let_refused_leave(self) -> None:
        """Takes back, in an endless loop, the tasks and samples of workers whose calls are refused, for example because
        another process has revoked them. Always checks all refused workers: a call that was in progress when its worker
        was revoked may have leased more."""
        refused, num_moves = set[str](), 0
        while True:
            moves = await self._writer.read(self.ledger.num_worker_moves)
            if moves != num_moves:
                refused, num_moves = await self._writer.read(self.ledger.refused_workers), moves
            held = {lease.worker for lease in self.lease_manager.leases.all()}
            for worker in refused & {*self.present(math.inf), *held}:
                await self.leave(worker)
            await asyncio.sleep(REFUSED_EVERY_S)

    def present(self, within_s: float) -> list[str]:
        """Returns the workers and judges that made a call within the last `within_s` seconds and have not left."""
        return sorted([*self.presence.present(within_s), *self.rewards.present(within_s)])

    async def _version_to_serve(self) -> Version | None:
        """Returns the version that an idle worker should load: the one that the first open task requires or, if it
        requires none, the latest. None if there is no version yet."""
        wanted = await self._writer.read(self.ledger.wanted_version)
        if wanted is None:
            return await self._writer.read(self.ledger.latest_version)
        return await self._share(self.ledger.version, wanted)

    # --- trainer: each call names the generation returned by `reconcile`, and is refused if a newer one exists ---

    async def reconcile(self, step: int, version: int | None, arrival: Arrival) -> Reconciled:
        reconciled = await self.call(self.ledger.reconcile, step, version, arrival)
        self.rounds.notify()
        self._progress.notify()  # a replaced trainer that waits for a batch is told so
        return reconciled

    async def next_version(self, *, generation: int = 0) -> int:
        return await self._share(self.ledger.as_trainer, generation, self.ledger.next_version_number)

    async def publish(self, version: Version, *, generation: int = 0) -> None:
        await self._share(self.ledger.as_trainer, generation, self.ledger.publish, version)
        await self._announce(version)

    async def claim(self, step: int, within_s: float, *, generation: int = 0) -> Batch:
        batch = await self._progress.first(partial(self._try_claim, step, generation), time.monotonic() + within_s)
        if batch is None:
            aside = "".join(f"; a worker gets no tasks for now: {why}" for why in self.fitness.aside().values())
            raise DeadlineError(
                f"step {step + 1}: no batch within rollout.deadline_s = {within_s:.0f} s; "
                f"{await self.call(self.ledger.waiting_for)}; {self.rewards.describe_waits()}{aside}"
            )
        crash_here("claim-stored")
        self.times.claimed(step)
        self._settle_busy_times()
        self.rounds.notify()
        self._notify_workers()
        if names := self.rewards.scorer.take_unseen():
            self.on_report({"event": "unused_weights", "names": names})
        self.on_claim(batch)
        return batch

    async def _try_claim(self, step: int, generation: int) -> Batch | None:
        self._stop_if_failing()
        claim = partial(self.ledger.claim, step, in_order=self._in_order)
        return await self._share(self.ledger.as_trainer, generation, claim)

    def _stop_if_failing(self) -> None:
        try:
            self.rewards.scorer.stop_if_failing()
            if self.only_worker in (aside := self.fitness.aside()):
                raise RunStopped(f"{aside[self.only_worker]}; correct the cause, then resume the run")
        except RunStopped as error:
            self._background.fail(error)
            raise

    def step_figures(self) -> dict[str, float]:
        """Returns figures for a step's metrics row: the counts of partials since the last call, and the over-provision
        factor. If the run may have several workers, adds how many are present and how many of these had no task since
        the last call."""
        figures = {**self._partials.take(), **self._provisioning.figures()}
        if not self.only_worker:
            busy = self._worked | {lease.worker for lease in self.lease_manager.leases.all()}
            idle = set(self.presence.present(PRESENT_S)) - busy  # one that is silent for longer may be dead
            figures |= {"workers": len(self._present_workers()), "idle_workers": len(idle)}
            self._worked.clear()
        return figures

    async def commit(
        self,
        step: int,
        version: Version,
        audited: Sequence[int] = (),
        compared: Sequence[ComparedSegment] = (),
        *,
        generation: int = 0,
    ) -> None:
        await self._share(self.ledger.as_trainer, generation, self.ledger.commit, step, version, audited, compared)
        if (took := self.times.committed(step)) is not None:
            self._provisioning.trained(*took)
        crash_here("step-committed")
        if off := [found.task for found in compared if found.num_off]:
            await self._quarantine(off)
        await self._announce(version)

    async def _quarantine(self, tasks: Sequence[int]) -> None:
        """Quarantines each worker that sampled an audited segment of `tasks`, if the worker's latest audits show wrong
        log-probs."""
        for worker, found in (await self.call(self.ledger.audit_results, tasks)).items():
            if is_believable(found):
                continue
            num_tokens, num_off = (sum(numbers) for numbers in zip(*found, strict=True))
            why = (
                f"{num_off} of its latest {num_tokens} audited log-probs differ from the trainer's by more than "
                f"{OFF_GAP:g}"
            )
            await self.call(self.ledger.move_worker, worker, WorkerState.QUARANTINED, why)
            await self.leave(worker)
            self.on_report({"event": "quarantine", "worker": worker, "why": why})

    async def checkpointed(self, step: int, *, generation: int = 0) -> None:
        await self._share(self.ledger.as_trainer, generation, self.ledger.checkpointed, step)
        self.note_checkpoint(step)

    def note_checkpoint(self, step: int) -> None:
        """Records that the checkpoint of `step` is durable."""
        self._checkpointed_step = max(self._checkpointed_step, step)
        self._background.spawn(self._maintenance.after_checkpoint(step))
        self._progress.notify()

    async def wait_checkpointed(self, step: int) -> None:
        """Waits until the checkpoint of `step` or a later step is durable."""
        await self._progress.wait_for(lambda: self._checkpointed_step >= step)

    async def wait_failed(self) -> None:
        """Waits until a background task fails, and raises its error; never returns."""
        await asyncio.shield(self._background.failure)

    def end(self, interrupted: str = "") -> None:
        """Ends the run: the answer to every waiting or later call for tasks, samples or new versions says that the run
        is over. `interrupted` says how the run ended before its last step, such as "stopped at step 3 of 12"; "": it
        has finished."""
        self._is_over, self._interrupted = True, interrupted
        self.rewards.end(interrupted)
        self._notify_all()
        self._versions.notify()

    async def report(self, row: Mapping[str, Any], *, generation: int = 0) -> None:
        """Passes the trainer's `row`, an event or a step's metrics, to `on_report`. Adds the coordinator's figures to a
        step's metrics. An error in `on_report` ends the run: otherwise a remote trainer would retry for ever,
        unnoticed. Raises `RunStopped` if a trainer with a later `generation` has taken over."""
        await self._share(self.ledger.check_generation, generation)
        if "event" not in row:
            row = {**row, "failures": self.rewards.scorer.num_failed, **self.step_figures(), **self.times.split()}
        try:
            self.on_report(row)
        except Exception as error:
            self._background.fail(error)
            raise

    async def _announce(self, version: Version) -> None:
        await self._drawing.open_evaluation(version)
        self._newest = version.number
        self._provisioning.began(self.presence.total_slots(self.settings.lease_ttl_s))
        self.rounds.notify()
        self._notify_all()
        self._versions.notify()
        await self._garbage.files(await self.call(self.ledger.versions_in_use))
        if self._garbage.is_due(version.number):
            needed = await self.call(self.ledger.versions_needed, self._checkpointed_step)
            self._background.spawn(self._garbage.pieces(needed, await self.call(self.ledger.signers)))

    async def evaluation(self, step: int) -> EvalRound:
        """Returns the evaluation of `step` once it is complete; waits without a deadline."""

        async def check() -> EvalRound | None:
            found = await self.call(self.ledger.eval_round, step)
            return found if found is not None and found.is_complete else None

        found = await self._progress.first(check)
        assert found is not None, "a wait without a deadline returned None; this is a bug"
        return found


def _track(worker: str) -> str:
    """Returns the name of a worker's track in the run's trace."""
    return f"worker {worker}"
