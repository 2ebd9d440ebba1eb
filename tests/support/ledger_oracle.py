"""What the ledger should remember, in plain Python objects: the oracle of the state machine.

It knows nothing of SQL and is slow on purpose: every answer is computed from all there is. Tasks and what is handed in
for them are in `ledger_oracle_tasks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ledger_oracle_tasks import UNFINISHED, Handed, OracleGroup, OracleTask, TaskOracle

from offbeat.ledger.records import TokenCounts, derive_seed


class Oracle(TaskOracle):
    def __init__(
        self,
        min_group: int,
        max_attempts: int,
        bound: int,
        groups_per_step: int | None = None,
        max_no_signal: float = 0,
    ):
        self.min_group, self.max_attempts, self.bound = min_group, max_attempts, bound
        self.groups_per_step, self.max_no_signal = groups_per_step, max_no_signal
        self.groups: list[OracleGroup] = []
        self.versions: dict[int, tuple[int, bool]] = {}
        """Step and whether abandoned, by number."""
        self.batches: dict[int, tuple[str, list[OracleGroup]]] = {}
        """State and groups of the surviving batches, by step."""
        self.audited: dict[int, set[int]] = {}
        """Tasks that an audit left out, by step."""

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

    # Groups

    def add(self, group: OracleGroup, size: int) -> None:
        first = sum(len(g.tasks) for g in self.groups) + 1
        group.tasks = [OracleTask(first + i) for i in range(size)]
        self.groups.append(group)

    def drop(self, groups: Iterable[OracleGroup], reason: str, *, for_step: int | None = None) -> None:
        """Drops groups and issues their prompts again where that is the rule."""
        again = list(groups)
        for group in again:
            group.state, group.reason, group.batch = "dropped", reason, None
            for task in group.tasks:
                task.waste(reason)
            for task in group.having(*UNFINISHED):
                task.state, task.reason = "dropped", reason
        for group in again:
            if group.is_eval or reason == "no_signal" or (reason == "failed" and group.retry == 1):
                continue
            retry = group.retry + (reason == "failed")
            seed = derive_seed(group.seed, "retry", retry) if reason == "failed" else group.seed
            step = group.require_step if group.require_step is None or for_step is None else for_step
            numbers = [n for n in self.living if self.versions[n][0] == step]
            new = OracleGroup(len(self.groups) + 1, group.ordinal, seed, step, max(numbers, default=None))
            new.retry, new.reissue_of = retry, group.id
            self.add(new, len(group.tasks))

    def settle(self) -> None:
        failed = []
        for group in self.groups:
            if group.state != "open":
                continue
            num_failed, num_scored = len(group.having("failed")), len(group.having("scored"))
            if len(group.tasks) - num_failed < (1 if group.is_eval else self.min_group):
                failed.append(group)
            elif num_failed + num_scored == len(group.tasks):
                group.state = "evaluated" if group.is_eval else "ready"
                if not group.is_eval and self.lacks_signal(group):
                    self.drop([group], "no_signal")
                    group.dropped_at_step = self.next_step
        self.drop(failed, "failed")

    def lacks_signal(self, group: OracleGroup) -> bool:
        """Whether all earned the same, and not so many such groups came before it that it is taken all the same."""
        if group.require_step is None:
            before = [g.id for g in self.groups if g.reason == "no_signal" and g.dropped_at_step == self.next_step]
        else:
            of_step = [g for g in self.groups if not g.is_eval and g.require_step == group.require_step]
            before = [g.ordinal for g in of_step if g.ordinal < group.ordinal]
        return len({task.reward for task in group.having("scored")}) == 1 and len(set(before)) < self.max_no_signal

    def num_dropped(self) -> int:
        return sum(group.state == "dropped" for group in self.groups)

    # Batches

    def ages(self, task: OracleTask, step: int) -> list[int]:
        """The staleness of each token; -1 where it may not be trained."""
        return [
            step - (self.token_step(number) or 0) if self.is_trainable(number, step) else -1
            for number in task.token_versions
        ]

    def claimable(self) -> list[int]:
        return [self.step, self.step + 1] if self.step in self.batches else [self.step]

    def claim(self, step: int, count: int, in_order: bool) -> list[OracleGroup] | None:
        if step in self.batches:
            return self.batches[step][1]

        def age(group: OracleGroup) -> tuple[float, int]:
            return float("inf") if group.first_step is None else group.first_step, group.ordinal

        waiting = [g for g in self.groups if not g.is_eval and g.state in ("open", "ready")]
        waiting = [g for g in waiting if g.require_step is None or g.require_step <= step]
        waiting.sort(key=lambda g: (0.0, g.ordinal) if in_order else age(g))
        stale = [g for g in waiting if self.is_stale(g, step)]
        waiting = [g for g in waiting if g not in stale]
        self.drop(stale, "stale", for_step=step)
        ready = [g for g in waiting if g.state == "ready"][:count]
        if len(ready) < count:
            return None
        if in_order:
            if waiting[:count] != ready:
                return None
        elif self.is_last_chance([g for g in waiting if g not in ready], ready, step):
            return None
        for group in ready:
            group.state, group.batch = "claimed", step
        ready.sort(key=lambda g: g.ordinal)
        self.batches[step] = ("claimed", ready)
        return ready

    def is_stale(self, group: OracleGroup, step: int) -> bool:
        if group.state == "open":
            return group.require_step is not None and step - group.require_step > self.bound
        return not any(age >= 0 for task in group.having("scored") for age in self.ages(task, step))

    def is_last_chance(self, left: list[OracleGroup], ready: list[OracleGroup], step: int) -> bool:
        """Whether some that are left, and older than one that would be taken, could not all be trained in time."""
        begun = [float("inf") if g.first_step is None else g.first_step for g in ready]
        deadlines = [g.first_step + self.bound for g in left if g.first_step is not None and g.first_step < max(begun)]
        return any(
            sum(step <= deadline <= at for deadline in deadlines) > (at - step) * len(ready)
            for at in range(step, step + self.bound + 1)
        )

    def commit(self, number: int, audited: set[int]) -> None:
        step = self.step
        self.mark_trained(step)
        self.audited[step] = audited
        self.publish(number, step + 1)

    def mark_trained(self, step: int) -> None:
        groups = self.batches[step][1]
        self.batches[step] = ("trained", groups)
        for group in groups:
            group.state = "trained"

    def reconcile(self, step: int) -> None:
        self.versions = {n: (s, abandoned or s > step) for n, (s, abandoned) in self.versions.items()}
        if step in self.batches:
            self.batches[step] = ("claimed", self.batches[step][1])
            self.audited.pop(step, None)
            for group in self.batches[step][1]:
                group.state = "claimed"
        for undone in [s for s in self.batches if s > step]:
            self.audited.pop(undone, None)
            for group in self.batches.pop(undone)[1]:
                group.state, group.batch = "ready", None
        for task in (task for group in self.groups for task in group.tasks):
            if task.prefix is not None and self.versions[int(task.prefix.versions[-1])][1]:
                task.waste("abandoned")
        self.drop([group for group in self.groups if self.is_left_behind(group)], "abandoned")
        for group in self.groups:
            if group.state in ("open", "ready") and (group.first_step or 0) > step:
                group.first_step = step if group.state == "ready" or group.having("leased") else None

    def is_left_behind(self, group: OracleGroup) -> bool:
        if group.state not in ("open", "ready"):
            return False
        if group.require_version is not None:
            return self.versions[group.require_version][1]
        numbers = [number for task in group.having("scored") for number in task.token_versions]
        return group.state == "ready" and all(self.token_step(number) is None for number in numbers)

    # Sums

    def tokens(self) -> TokenCounts:
        """Every sampled token in its one place."""
        place: Counter[str] = Counter()
        masked: Counter[str] = Counter({"stale": 0, "abandoned": 0, "audit": 0})
        wasted: Counter[str] = Counter()
        for group in self.groups:
            for task in group.tasks:
                for partial in task.partials:
                    place["partial"] += partial.num_tokens * (partial.state == "kept")
                    if partial.state == "wasted":
                        wasted[partial.reason or ""] += partial.num_tokens
                if task.whole is None:
                    continue
                if group.is_eval:
                    place["evaluated"] += task.whole.num_tokens
                elif group.state == "dropped":
                    wasted[group.reason or ""] += task.whole.num_tokens
                elif group.state != "trained":
                    place["waiting"] += task.whole.num_tokens
                elif task.state != "scored":
                    wasted[task.reason or ""] += task.whole.num_tokens
                else:
                    self._place_trained(task, group, place, masked)
        total = sum(place.values()) + sum(masked.values()) + sum(wasted.values())
        return TokenCounts(
            generated=total, masked=dict(masked), wasted={why: n for why, n in wasted.items() if n}, **place
        )

    def _place_trained(self, task: OracleTask, group: OracleGroup, place: Counter[str], masked: Counter[str]) -> None:
        step = next(step for step, (_, groups) in self.batches.items() if group in groups)
        for number in task.token_versions:
            if self.token_step(number) is None:
                masked["abandoned"] += 1
            elif not self.is_trainable(number, step):
                masked["stale"] += 1
            elif task.id in self.audited.get(step, ()):
                masked["audit"] += 1
            else:
                place["trained"] += 1


__all__ = ["Handed", "Oracle", "OracleGroup", "OracleTask"]
