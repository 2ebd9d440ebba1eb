"""What the ledger should remember, in plain Python objects: the oracle of the state machine.

It knows nothing of SQL and is slow on purpose: every answer is computed from all there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.ledger.records import derive_seed
from offbeat.trajectory import Trajectory

UNFINISHED = ("open", "leased", "accepted")


@dataclass
class OracleTask:
    id: int
    state: str = "open"
    worker: str | None = None
    num_failures: int = 0
    trajectory: Trajectory | None = None
    reward: float | None = None

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Number of tokens and version of each segment."""
        assert self.trajectory is not None
        return [(len(s.tokens), s.version or 0) for s in self.trajectory.segments]


@dataclass
class OracleGroup:
    id: int
    ordinal: int
    seed: int
    require_step: int | None
    require_version: int | None
    is_eval: bool = False
    retry: int = 0
    state: str = "open"
    reason: str | None = None
    batch: int | None = None
    reissue_of: int | None = None
    tasks: list[OracleTask] = field(default_factory=list)

    def having(self, *states: str) -> list[OracleTask]:
        return [task for task in self.tasks if task.state in states]


class Oracle:
    def __init__(self, min_group: int, max_attempts: int, bound: int):
        self.min_group, self.max_attempts, self.bound = min_group, max_attempts, bound
        self.groups: list[OracleGroup] = []
        self.versions: dict[int, tuple[int, bool]] = {}
        """Step and whether abandoned, by number."""
        self.batches: dict[int, tuple[str, list[OracleGroup]]] = {}
        """State and groups of the surviving batches, by step."""

    # Versions

    @property
    def living(self) -> list[int]:
        return [number for number, (_, abandoned) in self.versions.items() if not abandoned]

    @property
    def latest(self) -> int:
        return max(self.living)

    @property
    def step(self) -> int:
        return self.versions[self.latest][0]

    def publish(self, number: int, step: int) -> None:
        self.versions[number] = (step, False)
        for group in self.groups:
            if group.state == "open" and group.require_step == step:
                group.require_version = number

    def token_step(self, number: int) -> int | None:
        step, abandoned = self.versions[number]
        return None if abandoned else step

    # Groups

    def add(self, group: OracleGroup, size: int) -> None:
        first = sum(len(g.tasks) for g in self.groups) + 1
        group.tasks = [OracleTask(first + i) for i in range(size)]
        self.groups.append(group)

    def task(self, number: int) -> tuple[OracleGroup, OracleTask]:
        return next((group, task) for group in self.groups for task in group.tasks if task.id == number)

    def drop(self, group: OracleGroup, reason: str, *, for_step: int | None = None) -> None:
        """Drops a group and issues its prompt again where that is the rule."""
        group.state, group.reason, group.batch = "dropped", reason, None
        for task in group.having(*UNFINISHED):
            task.state, task.worker = "dropped", None
        if group.is_eval or (reason == "failed" and group.retry == 1):
            return
        retry = group.retry + (reason == "failed")
        seed = derive_seed(group.seed, "retry", retry) if reason == "failed" else group.seed
        step = group.require_step if group.require_step is None or for_step is None else for_step
        numbers = [n for n in self.living if self.versions[n][0] == step]
        version = max(numbers) if numbers else None
        again = OracleGroup(len(self.groups) + 1, group.ordinal, seed, step, version, retry=retry, reissue_of=group.id)
        self.add(again, len(group.tasks))

    def settle(self) -> None:
        for group in list(self.groups):
            if group.state != "open":
                continue
            num_failed, num_scored = len(group.having("failed")), len(group.having("scored"))
            if len(group.tasks) - num_failed < (1 if group.is_eval else self.min_group):
                self.drop(group, "failed")
            elif num_failed + num_scored == len(group.tasks):
                group.state = "evaluated" if group.is_eval else "ready"

    # Tasks

    def leasable(self, capacity: int, have_version: int | None) -> list[OracleTask]:
        def order(group: OracleGroup):
            return not group.is_eval, len(group.having("open")) == len(group.tasks), group.ordinal, group.id

        found = [
            task
            for group in sorted((g for g in self.groups if g.state == "open"), key=order)
            if group.require_step is None
            or (group.require_version is not None and group.require_version == have_version)
            for task in group.having("open")
        ]
        return found[:capacity]

    def fail(self, task: OracleTask) -> None:
        task.num_failures += 1
        task.worker = None
        task.state = "failed" if task.num_failures >= self.max_attempts else "open"

    # Batches

    def is_trainable(self, number: int, step: int) -> bool:
        token_step = self.token_step(number)
        return token_step is not None and 0 <= step - token_step <= self.bound

    def mask(self, task: OracleTask, step: int) -> list[bool]:
        return [self.is_trainable(number, step) for count, number in task.steps for _ in range(count)]

    def claim(self, count: int) -> list[OracleGroup] | None:
        step = self.step
        if step in self.batches:
            return self.batches[step][1]
        take: list[OracleGroup] = []
        stale: list[OracleGroup] = []
        blocked = False
        for group in sorted(self.groups, key=lambda g: g.ordinal):
            if group.is_eval or group.state not in ("open", "ready"):
                continue
            if group.require_step is not None and group.require_step > step:
                continue
            if group.state == "open":
                if group.require_step is not None and step - group.require_step > self.bound:
                    stale.append(group)
                else:
                    blocked = True
            elif not any(any(self.mask(task, step)) for task in group.having("scored")):
                stale.append(group)
            elif not blocked and len(take) < count:
                take.append(group)
        for group in stale:
            self.drop(group, "stale", for_step=step)
        if len(take) < count:
            return None
        for group in take:
            group.state, group.batch = "claimed", step
        self.batches[step] = ("claimed", take)
        return take

    def commit(self, number: int) -> None:
        step = self.step
        groups = self.batches[step][1]
        self.batches[step] = ("trained", groups)
        for group in groups:
            group.state = "trained"
        self.publish(number, step + 1)

    def reconcile(self, step: int) -> None:
        self.versions = {n: (s, abandoned or s > step) for n, (s, abandoned) in self.versions.items()}
        if step in self.batches:
            self.batches[step] = ("claimed", self.batches[step][1])
            for group in self.batches[step][1]:
                group.state = "claimed"
        for undone in [s for s in self.batches if s > step]:
            for group in self.batches.pop(undone)[1]:
                group.state, group.batch = "ready", None
        for group in list(self.groups):
            if group.state not in ("open", "ready"):
                continue
            is_bound_elsewhere = group.require_version is not None and self.versions[group.require_version][1]
            numbers = [number for task in group.having("scored") for _, number in task.steps]
            has_living = any(self.token_step(number) is not None for number in numbers)
            if is_bound_elsewhere or (group.state == "ready" and group.require_version is None and not has_living):
                self.drop(group, "abandoned")
