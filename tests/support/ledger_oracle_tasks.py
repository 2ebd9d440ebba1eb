"""The oracle's tasks: who is given which, and what becomes of all that is handed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.ledger.errors import Conflict, Fenced, Forbidden, LedgerError, Refused
from offbeat.ledger.records import Outcome, Submission
from offbeat.trajectory import Trajectory

UNFINISHED = ("open", "leased", "accepted")


@dataclass
class Handed:
    """Something handed in and taken: a trajectory or a partial."""

    trajectory: Trajectory
    worker: str
    fence: int
    state: str = "kept"
    reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.trajectory.num_tokens


@dataclass
class OracleTask:
    id: int
    state: str = "open"
    reason: str | None = None
    worker: str | None = None
    fence: int = 0
    num_failures: int = 0
    failed_fence: int = 0
    num_losses: int = 0
    whole: Handed | None = None
    partials: list[Handed] = field(default_factory=list)
    reward: float | None = None

    @property
    def token_versions(self) -> list[int]:
        assert self.whole is not None
        return self.whole.trajectory.versions.tolist()

    @property
    def prefix(self) -> Trajectory | None:
        kept = [partial.trajectory for partial in self.partials if partial.state == "kept"]
        return kept[0] if kept else None

    @property
    def home(self) -> str | None:
        """Who handed back what is kept of it."""
        kept = [partial.worker for partial in self.partials if partial.state == "kept"]
        return kept[0] if kept else None

    def waste(self, reason: str) -> None:
        for partial in self.partials:
            if partial.state == "kept":
                partial.state, partial.reason = "wasted", reason

    def carry_on(self, trajectory: Trajectory) -> None:
        """What is kept goes on, and what was given up last, if this began with it all the same."""
        for partial in self.partials:
            segments = partial.trajectory.segments
            is_beginning = trajectory.segments[: len(segments)] == segments
            if partial.state == "kept" or (partial is self.partials[-1] and partial.state == "wasted" and is_beginning):
                partial.state, partial.reason = "continued", None


@dataclass
class OracleGroup:
    id: int
    ordinal: int
    seed: int
    require_step: int | None
    require_version: int | None
    is_eval: bool = False
    retry: int = 0
    first_step: int | None = None
    state: str = "open"
    reason: str | None = None
    dropped_at_step: int | None = None
    batch: int | None = None
    reissue_of: int | None = None
    tasks: list[OracleTask] = field(default_factory=list)

    @property
    def is_paced(self) -> bool:
        return self.require_step is None and not self.is_eval

    @property
    def is_begun(self) -> bool:
        return self.first_step is not None

    def having(self, *states: str) -> list[OracleTask]:
        return [task for task in self.tasks if task.state in states]


class TaskOracle:
    groups: list[OracleGroup]
    versions: dict[int, tuple[int, bool]]
    bound: int
    max_attempts: int
    step: int
    batches: dict[int, tuple[str, list[OracleGroup]]]
    groups_per_step: int | None

    @property
    def next_step(self) -> int:
        """The first without a batch."""
        return max([self.step, *(claimed + 1 for claimed in self.batches)])

    def task(self, number: int) -> tuple[OracleGroup, OracleTask]:
        return next((group, task) for group in self.groups for task in group.tasks if task.id == number)

    def token_step(self, number: int) -> int | None:
        step, abandoned = self.versions[number]
        return None if abandoned else step

    def is_trainable(self, number: int, step: int) -> bool:
        token_step = self.token_step(number)
        return token_step is not None and 0 <= step - token_step <= self.bound

    # Leases

    def leased(self, worker: str | None = None) -> list[OracleTask]:
        tasks = [task for group in self.groups for task in group.having("leased")]
        return [task for task in tasks if worker is None or task.worker == worker]

    def may_begin(self, step: int) -> int:
        """How many groups may be begun with a version of a step: by trying, until one would be trained too late."""
        if self.groups_per_step is None:
            return 1000
        begun = [g.first_step for g in self.groups if g.state in ("open", "ready") and g.is_paced and g.is_begun]
        for number in range(1000):
            firsts = [*begun, *[step] * (number + 1)]
            for last in {first for first in firsts if first >= step}:
                room = (last + self.bound - self.next_step + 1) * self.groups_per_step
                if sum(first <= last for first in firsts) > room:
                    return number
        return 1000

    def lease(self, worker: str, capacity: int, have: int | None, total_slots: int | None = None) -> list[OracleTask]:
        """Hands out open tasks: a group at a time, few where workers vanished with one of them."""
        step = None if have is None or have not in self.versions else self.token_step(have)
        held, asked = [task.num_losses for task in self.leased(worker)], capacity
        num_slots = len(held) + capacity
        waiting = [g for g in self.groups if g.having("open") and g.state == "open"]
        waiting = [g for g in waiting if g.require_step is None or g.require_version is not None]
        if total_slots is not None and total_slots > num_slots:
            num_open = sum(len(group.having("open")) for group in waiting)
            capacity = min(capacity, math.ceil(num_open * num_slots / total_slots))
        num_begin = 0 if step is None else self.may_begin(step)
        given: list[OracleTask] = []
        is_alone = total_slots is None or total_slots <= asked
        for group in self.in_order(waiting, None if is_alone else worker):
            if capacity <= 0:
                break
            if group.is_paced and not group.is_begun and num_begin == 0:
                continue
            if group.require_step is None and (step is None or step < (group.first_step or 0)):
                continue
            if group.require_step is not None and (group.require_version is None or group.require_version != have):
                continue
            count = min(capacity, len(group.having("open")))
            most = max(task.num_losses for task in group.having("open"))
            for level in range(1, most + 1):
                allowed = max(1, num_slots // 8**level)
                count = min(count, max(0, allowed - sum(losses >= level for losses in held)))
            num_begin -= group.is_paced and not group.is_begun and count > 0
            held += [most] * count
            capacity -= count
            fit = [t for t in group.having("open") if t.prefix is None or int(t.prefix.versions[-1]) <= (have or 0)]
            if not is_alone:
                fit = sorted(fit, key=lambda task: task.home not in (None, worker))
            for task in fit[:count]:
                task.state, task.worker, task.fence = "leased", worker, task.fence + 1
                if step is not None:
                    group.first_step = step if group.first_step is None else min(step, group.first_step)
            given += fit[:count]
        return given

    def in_order(self, waiting: Sequence[OracleGroup], worker: str | None) -> list[OracleGroup]:
        """Before the first group that is begun anew, those come last that lie with other workers alone."""
        ordered = sorted(waiting, key=_order)
        first_new = next(
            (i for i, g in enumerate(ordered) if g.require_version is None and not g.is_begun), len(ordered)
        )
        homes = {g.id: {task.home for task in g.having("open")} - {None} for g in ordered[:first_new] if not g.is_eval}
        away = {number for number, those in homes.items() if worker is not None and those and worker not in those}
        return [*sorted(ordered[:first_new], key=lambda g: g.id in away), *ordered[first_new:]]

    def fail(self, task: OracleTask, reason: str) -> None:
        if task.state not in ("open", "leased") or task.failed_fence == task.fence:
            return
        task.num_failures, task.failed_fence = task.num_failures + 1, task.fence
        if task.num_failures < self.max_attempts:
            task.state = "open"
            return
        task.state, task.reason = "failed", reason
        task.waste(reason)
        self.settle()

    def lose(self, tasks: Sequence[OracleTask]) -> int:
        """Workers vanished with these tasks: of each worker's, the one alone most suspect is to blame."""
        num_lost = 0
        for worker in dict.fromkeys(task.worker for task in tasks):
            lost = [task for task in tasks if task.worker == worker and task.state == "leased"]
            most = [task for task in lost if task.num_losses == max(t.num_losses for t in lost)]
            num_lost += len(lost)
            for task in lost:
                task.num_losses += 1
            if len(most) == 1:
                self.fail(most[0], "lost")
            for task in lost:
                task.state = "open" if task.state == "leased" else task.state
        return num_lost

    def release(self, worker: str | None = None) -> int:
        leased = self.leased(worker)
        for task in leased:
            task.state = "open"
        return len(leased)

    def settle(self) -> None:
        raise NotImplementedError

    # What is handed in

    def hand_in(self, submission: Submission) -> Outcome | type[LedgerError]:
        """What becomes of a submission, which is stored if it may be."""
        trajectory, worker, fence = submission
        group, task = self.task(trajectory.task)
        for before in (task.whole, task.partials[-1] if task.partials else None):
            if before is not None and before.fence == fence:
                if before.worker != worker:
                    return Forbidden
                return Outcome.REPEATED if before.trajectory == trajectory else Conflict
        if fence < task.fence:
            return Fenced
        if fence > task.fence or worker != task.worker:
            return Forbidden
        is_late = task.state in ("failed", "dropped")
        if is_late and trajectory.is_partial:
            return Fenced
        if not self.is_fit(trajectory, group, task, is_late):
            return Refused
        task.carry_on(trajectory)
        handed = Handed(trajectory, worker, fence)
        if trajectory.is_partial:
            task.partials.append(handed)
            task.state = "open"
            return Outcome.PARTIAL
        task.whole = handed
        if is_late:
            return Outcome.LATE
        task.state = "accepted"
        return Outcome.STORED

    def is_fit(self, trajectory: Trajectory, group: OracleGroup, task: OracleTask, is_late: bool) -> bool:
        numbers = trajectory.versions.tolist()
        if not numbers or any(number not in self.versions for number in numbers):
            return False
        if is_late:
            return True
        prefix = task.prefix
        if prefix is not None and trajectory.segments[: len(prefix.segments)] != prefix.segments:
            return False
        if group.require_step is None:
            return any(self.is_trainable(number, self.step) for number in numbers)
        return all(self.token_step(number) == group.require_step for number in numbers)


def _order(group: OracleGroup) -> tuple[bool, bool, int, int]:
    return not group.is_eval, len(group.having("open")) == len(group.tasks), group.ordinal, group.id
