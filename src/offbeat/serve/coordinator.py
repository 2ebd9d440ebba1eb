"""The coordinator: hands out tasks, takes in trajectories, has them scored, gives the trainer its batches.

It decides nothing itself: `control` decides, the ledger remembers, and this module carries calls between workers,
trainer, judges and ledger. Nothing that matters lives here alone, so it may be killed at any moment and started
again on the same ledger: workers that went on meanwhile find their leases as they left them. Acknowledgements follow
the commit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

from offbeat.control.admit import Pace
from offbeat.control.fitness import ASIDE_S, Fitness
from offbeat.control.over_provision import Decision
from offbeat.control.rounds import Setting
from offbeat.control.step_time import Timing
from offbeat.control.trust import OFF_GAP, is_believable
from offbeat.crash import crash_here
from offbeat.errors import DeadlineError, RunOver, RunStopped
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, ComparedSegment, EvalRound, Outcome, Reconciled, Submission
from offbeat.ledger.trainers import Arrival
from offbeat.ledger.workers import WorkerState
from offbeat.serve.carrying import Carrying
from offbeat.serve.clearing import Clearing
from offbeat.serve.client import Heartbeat, Lease
from offbeat.serve.drawing import Drawing
from offbeat.serve.foresight import provisioning_of
from offbeat.serve.holding import Holding
from offbeat.serve.issuing import Issuer
from offbeat.serve.judging import Judging
from offbeat.serve.keeping import Keeper, KeepSettings
from offbeat.serve.presence import Presence
from offbeat.serve.relaying import Relaying
from offbeat.serve.rounds import Rounds
from offbeat.serve.timing import StepTimes
from offbeat.serve.waiting import Bell, News
from offbeat.serve.writer import Writer
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.version import Version

P = ParamSpec("P")
R = TypeVar("R")

THEIR_FAULT = (Conflict, Fenced, Forbidden, Refused, Unknown)
"""What is wrong with a call, and not with us."""
FORGET_AFTER_S = 3600.0
"""Of silence: nobody counts on such a worker any more, and it loses nothing by being a new one to us. Never less than
twice the time of a lease, within which its tasks are taken back."""
FORGET_EVERY_S = 60.0


@dataclass(frozen=True)
class CoordinatorSettings:
    """How a run is coordinated. How many groups make a batch, and how old they may be, is the ledger's to say."""

    num_steps: int
    overlap: bool = False
    """Whether workers go on while the trainer trains."""
    over_provision: float | Literal["auto"] = 1.0
    rounds: Setting | None = None
    """What is known beforehand of rounds whose over-provision factor is chosen as the run goes on; None: 1."""
    max_new_tokens: int = 1
    lease_ttl_s: float = 60.0
    keep: KeepSettings = field(default_factory=KeepSettings)
    vocab_size: int | None = None
    """Tokens beyond it are refused; None: not looked at."""


class Coordinator:
    """Serves workers and a trainer from one ledger; `offbeat.serve.inside` binds it to one of them."""

    def __init__(
        self,
        ledger: Ledger,
        issuer: Issuer,
        judging: Judging,
        settings: CoordinatorSettings,
        clearing: Clearing | None = None,
        on_report: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ):
        self.ledger, self.issuer, self.judging, self.settings = ledger, issuer, judging, settings
        self.on_report = on_report
        self._clearing = clearing or Clearing(None)
        self._times, self._carrying = StepTimes(), Carrying()
        self._provisioning = provisioning_of(
            settings.over_provision,
            ledger.max_staleness if settings.overlap else None,
            settings.rounds,
            settings.max_new_tokens,
            self._tell_choice,
        )
        self._bell = Bell()
        self._writer = Writer(ledger, self._bell.fail)  # or callers would try again for ever, and nobody would know why
        self._share = self._writer.call
        self._keeper = Keeper(ledger, settings.keep, self.call, lambda row: self.on_report(row))
        self._work, self._versions = News(), News()
        """For those who wait for tasks, and for those who wait for a version."""
        self._rounds = Rounds(ledger, self._writer.read, self._bell)
        assert ledger.groups_per_step is not None
        self._groups_per_step = ledger.groups_per_step
        self._in_order = ledger.max_staleness == 0
        """Then every task requires the version of its step, and batches take them by ordinal."""
        pace = Pace(self._groups_per_step, settings.num_steps)
        self._drawing = Drawing(ledger, issuer, self._share, pace, requires_version=self._in_order)
        self._presence, self.relaying, self.fitness = Presence(), Relaying(), Fitness()
        self.holding = Holding(
            ledger,
            self._writer,
            self._presence,
            settings.lease_ttl_s,
            settings.max_new_tokens,
            self._tell_all,
            self.fitness.forget,
            self._set_aside_hoarder,
        )
        self.only_worker = ""
        """The only one that a run of one process can have: without it there is nothing to wait for."""
        self._is_over = False
        self._checkpointed_step = -1
        self._newest: int | None = None
        """The version announced last."""

    def _tell_choice(self, decision: Decision) -> None:
        self.on_report({"event": "over_provision", "factor": decision.factor, "why": decision.reason})

    async def start(self, *, keep_leases: bool = False) -> None:
        """After a restart trajectories may be waiting for their reward. Leases are kept where their workers can have
        gone on without us, and have their whole time again; otherwise nobody can hold one."""
        await self.holding.start(keep_leases=keep_leases)
        self.judging.start(self.ledger, self._share, self._bell, self._tell_workers)
        self._bell.spawn(self.holding.expire())
        self._bell.spawn(self._forget_for_ever())

    async def close(self) -> None:
        await self._bell.close()
        await self._writer.close()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a ledger call, however long, on the writer thread."""
        return await self._writer.alone(function, *args, **kwargs)

    # --- workers ---

    async def lease(self, worker: str, capacity: int, have_version: int | None, wait_s: float) -> Lease:
        deadline_s, ttl_s = time.monotonic() + wait_s, self.settings.lease_ttl_s
        while True:
            changed = self._work.changed
            if self._is_over:
                return Lease(ttl_s=ttl_s, is_over=True)
            if aside_s := self.fitness.aside_s(worker):
                until_s = min(deadline_s, time.monotonic() + aside_s)
                if not await self._bell.wait(changed, until_s) and until_s == deadline_s:
                    return Lease(ttl_s=ttl_s)
                continue
            self._presence.hear(worker, capacity)
            await self._drawing.draw(self._provisioning.factor())
            number = await self._rounds.current()
            tasks = await asyncio.shield(self._hand_out(worker, capacity, have_version, number))
            if tasks:
                return Lease(tuple(tasks), ttl_s=ttl_s, round=number)
            version = await self._version_to_serve()
            if version is not None and version.number != have_version:
                return Lease(version=version, ttl_s=ttl_s)
            if not await self._bell.wait(changed, deadline_s):
                return Lease(ttl_s=ttl_s)

    async def _hand_out(
        self, worker: str, capacity: int, have_version: int | None, round_number: int | None
    ) -> list[Task]:
        """Leases tasks and starts their clocks: to its end, also if whoever asked is gone; or they would never end."""
        ttl_s = self.settings.lease_ttl_s
        ask = partial(
            self.ledger.lease,
            worker,
            capacity,
            have_version,
            total_slots=self._presence.total_slots(ttl_s),
            only_eval=not self._rounds.may_join(worker, round_number, have_version),
        )
        has_failed = self.fitness.has_failed(worker)
        tasks = await self._share(ask, skips_failed=has_failed)
        if has_failed and not tasks and not self._presence.others(worker, ttl_s):
            tasks = await self._share(ask)  # there is nobody to leave them to
        self.holding.granted(worker, tasks)
        if tasks:
            self._times.leased()
            self._carrying.handed_out(tasks)
            self._provisioning.handed_out(tasks)
        if any(task.require_version is None for task in tasks):
            self._rounds.joined(worker, round_number, have_version)
        if any(task.require_version not in (None, self._newest) for task in tasks):
            self._versions.ring()  # an evaluation of an older version is under way: the others may go on to the newest
        return tasks

    def _tell_workers(self) -> None:
        """There may be tasks that were not there before, or could not be begun, or room for more of them."""
        self._drawing.look_again()
        self._work.ring()

    def _tell_all(self) -> None:
        self._bell.ring()
        self._tell_workers()

    async def heartbeat(
        self,
        worker: str,
        held: Sequence[tuple[int, int]],
        life: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Heartbeat:
        self._presence.hear(worker)
        self.relaying.hear(worker)
        if figures is not None:
            self._presence.told(worker, figures)
        return await self.holding.heartbeat(worker, held, life)

    async def submit(self, worker: str, trajectory: Trajectory, fence: int) -> Outcome:
        self._check_tokens(trajectory)
        try:
            outcome = await self._writer.submit(Submission(trajectory, worker, fence))
        except THEIR_FAULT:
            raise
        except Exception as error:
            self._bell.fail(error)
            raise
        crash_here("submission-stored")
        self.holding.handed_in(worker, trajectory, fence, is_new=outcome is not Outcome.REPEATED)
        self.fitness.succeeded(worker)
        self._times.submitted()
        if outcome is not Outcome.REPEATED:
            self._provisioning.submitted(trajectory)
        if outcome is Outcome.STORED:
            self.judging.arrived()
            if self.holding.cleared(trajectory.task):
                self._work.ring()
        elif outcome is Outcome.PARTIAL:
            self._carrying.handed_back(trajectory)
            self._tell_workers()
        return outcome

    def _check_tokens(self, trajectory: Trajectory) -> None:
        size = self.settings.vocab_size
        highest = max((int(segment.tokens.max()) for segment in trajectory.segments), default=0)
        if size is not None and highest >= size:
            raise Refused(f"task {trajectory.task}: token {highest} is none of the model's {size}")

    async def fail(self, worker: str, task: int, fence: int, reason: str) -> None:
        """Counts against the task, and against the worker: one that fails most of what it is given is set aside."""
        counts = not self.fitness.aside_s(worker)
        await self._share(self.ledger.fail, worker, task, fence, "engine", reason, counts=counts)
        self.judging.scorer.num_failed += 1
        self.holding.failed(worker, task)
        if counts and (why := self.fitness.failed(worker, task, reason)):
            await self._tell_set_aside(worker, why)
        self._tell_all()

    async def _set_aside_hoarder(self, worker: str, why: str) -> None:
        self.fitness.set_aside(worker, why)
        await self._tell_set_aside(worker, why)

    async def _tell_set_aside(self, worker: str, why: str) -> None:
        await self._share(self.ledger.set_aside, worker, why, ASIDE_S)
        self._presence.set_aside(worker)
        self.on_report({"event": "set_aside", "worker": worker, "seconds": ASIDE_S, "why": why})

    async def give_back(self, worker: str, leases: Sequence[tuple[int, int]]) -> None:
        if await self.holding.give_back(worker, leases):
            self._tell_workers()

    async def round_over(self, number: int, wait_s: float) -> bool:
        return await self._rounds.is_over(number, wait_s)

    def timed(self, worker: str, timings: Sequence[Timing]) -> None:
        self._presence.hear(worker)
        self._provisioning.timed(worker, timings)

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        deadline_s = time.monotonic() + wait_s
        while True:
            changed = self._versions.changed
            version = await self._version_to_serve()
            if version is not None and version.number != have_version:
                return version
            if self._is_over:  # whose worker is busy asks for nothing else
                raise RunOver("the run is over")
            if not await self._bell.wait(changed, deadline_s):
                return None

    async def leave(self, worker: str) -> None:
        await self.holding.leave(worker)
        self._forget(worker)
        self.judging.leave(worker)
        self._tell_workers()

    def _forget(self, worker: str) -> None:
        self.fitness.forget(worker)
        self.holding.pace.forget(worker)
        self._presence.left(worker)
        self._rounds.left(worker)
        self._provisioning.left(worker)
        self.relaying.leave(worker)

    def forget_silent(self) -> None:
        """Forgets workers that vanished long ago, or memory would grow with every name that ever joined."""
        for worker in self._presence.silent(max(FORGET_AFTER_S, 2 * self.settings.lease_ttl_s)):
            self._forget(worker)
        self.judging.forget_silent()

    async def _forget_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FORGET_EVERY_S)
            self.forget_silent()

    @property
    def worker_figures(self) -> Mapping[str, Mapping[str, float]]:
        """What each worker that is there told of itself last."""
        return self._presence.figures

    def present(self, within_s: float) -> list[str]:
        """Workers and judges that were heard of in this time and have not left."""
        return sorted([*self._presence.present(within_s), *self.judging.present(within_s)])

    async def _version_to_serve(self) -> Version | None:
        """What the first open task requires: an evaluation of an older version too; otherwise the latest."""
        wanted = await self._writer.read(self.ledger.wanted_version)
        if wanted is None:
            return await self._writer.read(self.ledger.latest_version)
        return await self._share(self.ledger.version, wanted)

    # --- trainer; each call names the generation that `reconcile` gave, and is refused once there is a newer one ---

    async def reconcile(self, step: int, version: int | None, arrival: Arrival) -> Reconciled:
        reconciled = await self.call(self.ledger.reconcile, step, version, arrival)
        self._rounds.ring()
        self._bell.ring()  # a trainer that waits for a batch learns that it has been replaced
        return reconciled

    async def next_version(self, *, generation: int = 0) -> int:
        return await self._share(self.ledger.under, generation, self.ledger.next_version_number)

    async def publish(self, version: Version, *, generation: int = 0) -> None:
        await self._share(self.ledger.under, generation, self.ledger.publish, version)
        await self._announce(version)

    async def claim(self, step: int, within_s: float, *, generation: int = 0) -> Batch:
        deadline_s = time.monotonic() + within_s
        while True:
            changed = self._bell.changed
            self._stop_if_failing()
            batch = await self._share(
                self.ledger.under,
                generation,
                self.ledger.claim,
                step,
                self._groups_per_step,
                self.ledger.max_staleness,
                in_order=self._in_order,
            )
            if batch is not None:
                crash_here("claim-stored")
                self._times.claimed(step)
                self._provisioning.claimed()
                self._rounds.ring()
                self._tell_workers()
                if names := self.judging.scorer.take_unseen():
                    self.on_report({"event": "unused_weights", "names": names})
                return batch
            if not await self._bell.wait(changed, deadline_s):
                aside = "".join(f"; set aside: {why}" for why in self.fitness.aside().values())
                raise DeadlineError(
                    f"step {step}: no batch within rollout.deadline_s = {within_s:.0f} s; "
                    f"{await self.call(self.ledger.waiting_for)}; {self.judging.standing()}{aside}"
                )

    def _stop_if_failing(self) -> None:
        try:
            self.judging.scorer.stop_if_failing()
            if self.only_worker in (aside := self.fitness.aside()):
                raise RunStopped(f"{aside[self.only_worker]}; mend it, then --resume the run")
        except RunStopped as error:
            self._bell.fail(error)
            raise

    def step_figures(self) -> dict[str, float]:
        """What was carried on from one version to the next since this was asked last, and how much is under way."""
        return {**self._carrying.take(), **self._provisioning.figures()}

    def time_split(self) -> dict[str, float]:
        """Seconds that the batch claimed last took to generate, and then to score."""
        return self._times.split()

    async def commit(
        self,
        step: int,
        version: Version,
        audited: Sequence[int] = (),
        compared: Sequence[ComparedSegment] = (),
        *,
        generation: int = 0,
    ) -> None:
        await self._share(self.ledger.under, generation, self.ledger.commit, step, version, audited, compared)
        if (took := self._times.committed(step)) is not None:
            self._provisioning.trained(*took)
        crash_here("step-committed")
        if off := [found.task for found in compared if found.num_off]:
            await self._quarantine(off)
        await self._announce(version)

    async def _quarantine(self, tasks: Sequence[int]) -> None:
        """Shuts out workers that handed in a part of these tasks and can no longer be believed."""
        for worker, found in (await self.call(self.ledger.audited, tasks)).items():
            if is_believable(found):
                continue
            num_tokens, num_off = (sum(numbers) for numbers in zip(*found, strict=True))
            why = f"{num_off} of the latest {num_tokens} log-probs compared are off by more than {OFF_GAP:g}"
            await self.call(self.ledger.move_worker, worker, WorkerState.QUARANTINED, why)
            await self.leave(worker)
            self.on_report({"event": "quarantine", "worker": worker, "why": why})

    async def checkpointed(self, step: int, *, generation: int = 0) -> None:
        await self._share(self.ledger.under, generation, self.ledger.checkpointed, step)
        self.learn_of_checkpoint(step)

    def learn_of_checkpoint(self, step: int) -> None:
        """A checkpoint of this step is durable, whoever told of it and when."""
        self._checkpointed_step = max(self._checkpointed_step, step)
        self._bell.spawn(self._keeper.after_checkpoint(step))
        self._bell.ring()

    async def until_checkpointed(self, step: int) -> None:
        """Waits until a checkpoint of this step or a later one is durable."""
        while self._checkpointed_step < step:
            await self._bell.wait(self._bell.changed, math.inf)

    async def until_broken(self) -> None:
        """Waits for ever, or until a part of us fails: then it raises why."""
        while True:
            await self._bell.wait(asyncio.Event(), math.inf)

    def end(self) -> None:
        """Tells workers, whenever they ask, that the run is over."""
        self._is_over = True
        self.judging.end()
        self._tell_all()
        self._versions.ring()

    async def report(self, row: Mapping[str, Any], *, generation: int = 0) -> None:
        """A row that cannot be written ends the run: whoever reports it would try for ever, and nobody would know."""
        await self._share(self.ledger.check_generation, generation)
        try:
            self.on_report(row)
        except Exception as error:
            self._bell.fail(error)
            raise

    async def _announce(self, version: Version) -> None:
        await self._drawing.open_evaluation(version)
        self._newest = version.number
        await self._begin_round(version)
        self._rounds.ring()
        self._tell_all()
        self._versions.ring()
        await self._clearing.files(await self.call(self.ledger.versions_in_use))
        if self._clearing.is_due(version.number):
            needed = await self.call(self.ledger.versions_needed, self._checkpointed_step)
            self._bell.spawn(self._clearing.pieces(needed, await self.call(self.ledger.signers)))

    async def _begin_round(self, version: Version) -> None:
        slots = self._presence.total_slots(self.settings.lease_ttl_s)
        survivors = await self._share(self.ledger.survivors) if self._provisioning.wants_survivors else []
        self._provisioning.began(version.step, slots, survivors)

    async def evaluation(self, step: int) -> EvalRound:
        """The evaluation of a step, once it is complete; deadlines are the trainer's, without which no step comes."""
        while True:
            changed = self._bell.changed
            found = await self.call(self.ledger.eval_round, step)
            if found is not None and found.is_complete:
                return found
            await self._bell.wait(changed, math.inf)
