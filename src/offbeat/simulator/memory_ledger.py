"""What a ledger stores, in memory: groups, tasks, leases and batches of a simulated run.

It loads candidates for the rules and stores their answers, like `offbeat.ledger`, and decides nothing itself. A
`Baseline` replaces some of the rules by those of another system.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from offbeat.rules.groups import (
    AdmissionState,
    AdmissionTarget,
    Candidate,
    GroupVerdict,
    VersionRun,
    admit,
    may_begin,
    may_retry,
    oldest_trainable_step,
    select_batch,
    settle,
    settle_ready,
    trained_staleness,
    unclaimed_step,
)
from offbeat.rules.leases import (
    NUM_NEAR,
    OpenGroup,
    OpenTask,
    Requester,
    choose_groups,
    choose_tasks,
    culprit,
    ends_task,
    oldest_first_step,
)
from offbeat.simulator.baselines import Baseline
from offbeat.simulator.lengths import Lengths
from offbeat.simulator.tasks import SimulatedGroup, SimulatedTask, TaskPhase

ASKED_PER_BATCH = 128
"""While a batch waits for a group, the rules are asked again when this group ends, and whenever so small a share of a
batch has become ready that is older than the youngest group to be taken. Only such groups can change the answer, and
for batches of up to this many groups each of them is a reason to ask."""


@dataclass(frozen=True)
class LedgerSettings:
    groups_per_step: int
    max_staleness: int
    num_steps: int
    in_rounds: bool = False
    min_group: int = 2
    max_attempts: int = 3
    max_no_signal: float = 0.0


@dataclass(frozen=True)
class SimulatedBatch:
    """A claimed batch. Numbers of tokens by staleness are those with loss mask 1."""

    step: int
    groups: tuple[SimulatedGroup, ...]
    num_answers: int
    num_trained: int
    num_prompt_tokens: int
    num_square_tokens: float
    by_staleness: Counter[int]
    num_masked: int
    """Tokens that are too old to be trained on."""
    num_over_answers: int
    """Answers with a token that is trained on although it is staler than the bound."""


@dataclass
class _Sums:
    """Where generated tokens went."""

    trained: int = 0
    masked: int = 0
    wasted: Counter[str] = field(default_factory=Counter)
    """Tokens that no step trains, by cause."""


class MemoryLedger:
    """State of one simulated run. `clock` gives the simulated time."""

    def __init__(self, settings: LedgerSettings, lengths: Lengths, baseline: Baseline, clock: Callable[[], float]):
        self.settings, self.baseline, self._lengths, self._clock = settings, baseline, lengths, clock
        self.group_size = lengths.group_size
        self.newest: int | None = None
        """Newest version. Version n is that of step n, because no simulated trainer falls back."""
        self.claimed: SimulatedBatch | None = None
        self.last_claimed = -1
        self.sums = _Sums()
        self.num_alive = self.num_drawn = 0
        self.num_groups_dropped: Counter[str] = Counter()
        self._in_order = settings.max_staleness == 0
        self._next_task = self._next_group = 0
        self._unfinished: dict[int, SimulatedGroup] = {}
        self._ready: list[tuple[float, int, SimulatedGroup]] = []
        """Ready groups in the order of selection, with their keys."""
        self._partly_open: list[tuple[int, int, SimulatedGroup]] = []
        self._wholly_open: list[tuple[int, int, SimulatedGroup]] = []
        """Groups with open tasks: those of which a task is leased or has ended, and the others. By ordinal."""
        self.num_open = self.num_unfinished_tasks = 0
        self._begun: Counter[int] = Counter()
        """Open and ready groups by `first_step`, for `may_begin`."""
        self._held: dict[str, dict[int, SimulatedTask]] = defaultdict(dict)
        self.suspects: set[int] = set()
        """Unfinished tasks whose worker vanished."""
        self._ask_again = True
        self._waits_for: int | None = None
        self._last_key: tuple[float, int] | None = None
        self._num_no_signal = self._num_older = 0
        self.by_length: Counter[int] = Counter()
        self.masked_by_length: Counter[int] = Counter()
        """Tokens of answers in batches, and those of them that are masked, by the number of bits of the answer's
        length."""

    # Admission

    def draw(self, over_provision: float) -> int:
        """Draws as many groups as admission allows; returns their number."""
        settings = self.settings
        target = AdmissionTarget(settings.groups_per_step, settings.num_steps, over_provision)
        state = AdmissionState(self.newest, self.num_alive)
        count = self.baseline.admit(
            state,
            target,
            num_drawn=self.num_drawn,
            num_unfinished=self.num_unfinished_tasks,
            group_size=self._lengths.group_size,
            max_staleness=settings.max_staleness,
        )
        if count is None:
            count = admit(state, target)
        for _ in range(count):
            self._new_group(self.num_drawn)
            self.num_drawn += 1
        return count

    def _new_group(self, ordinal: int, retry: int = 0, like: SimulatedGroup | None = None) -> SimulatedGroup:
        if like is None or retry:
            lengths, prompt, spread = self._lengths.draw()
        else:
            lengths = [task.length for task in like.tasks]
            prompt, spread = like.tasks[0].num_prompt_tokens, like.spread
        group = SimulatedGroup(self._next_group, ordinal, len(lengths), spread, retry)
        self._next_group += 1
        number = self._next_task
        group.tasks = [SimulatedTask(number + i, group, i, length, prompt) for i, length in enumerate(lengths)]
        self._next_task += len(lengths)
        if self._in_order:
            group.require_step = group.require_version = self.newest
        self._unfinished[group.id] = group
        insort(self._wholly_open, (ordinal, group.id, group))
        self.num_open += group.size
        self.num_unfinished_tasks += group.size
        self.num_alive += 1
        return group

    # Leases

    def wanted_version(self) -> int | None:
        """Returns the version that an idle worker should load."""
        for queue in (self._partly_open, self._wholly_open):
            if queue:
                required = queue[0][2].require_version
                return self.newest if required is None else required
        return self.newest

    def lease(self, worker: str, capacity: int, version: int | None, total_slots: int) -> list[SimulatedTask]:
        if capacity <= 0 or version is None or not self.num_open:
            return []
        if self.settings.in_rounds and self.claimed is not None:
            return []
        if self.baseline.leases_in_order:
            return self._lease_in_order(worker, capacity, version)
        held = self._held[worker]
        is_alone = total_slots <= capacity
        num_near = NUM_NEAR + capacity
        view = _View(self, worker, version, is_alone)
        near = view.first(num_near)
        losses: Counter[int] = Counter()
        if self.suspects:
            losses.update(task.num_losses for task in held.values() if task.num_losses)
        requester = Requester(
            capacity, version, step=version, total_slots=total_slots, num_held=len(held), suspects=losses
        )
        leased: list[SimulatedTask] = []
        for number, count in choose_groups(near, requester, view, is_all=len(near) < num_near):
            group = self._unfinished[number]
            leased += self._lease_tasks(group, worker, count, version, is_alone=is_alone)
        return leased

    def _lease_in_order(self, worker: str, capacity: int, version: int | None) -> list[SimulatedTask]:
        leased: list[SimulatedTask] = []
        while len(leased) < capacity and (queue := self._partly_open or self._wholly_open):
            count = capacity - len(leased)
            group = queue[0][2]
            found = self._lease_tasks(group, worker, count, version, is_alone=True)
            assert found, "this is a bug: a group with open tasks gave none"
            leased += found
        return leased

    def _lease_tasks(
        self,
        group: SimulatedGroup,
        worker: str,
        count: int,
        version: int | None,
        *,
        is_alone: bool,
    ) -> list[SimulatedTask]:
        open_tasks = [task for task in group.tasks if task.phase is TaskPhase.OPEN]
        if group.first_step is None or self.baseline.leases_in_order:
            chosen = open_tasks[:count]
        else:
            by_id = {task.id: task for task in open_tasks}
            records = [OpenTask(task.id, task.last_version, task.partial_of) for task in open_tasks]
            ids = choose_tasks(records, count, worker, version, is_alone=is_alone, skips_failed=False)
            chosen = [by_id[number] for number in ids]
        if not chosen:
            return []
        held = self._held[worker]
        for task in chosen:
            task.phase, task.worker = TaskPhase.LEASED, worker
            task.fence += 1
            held[task.id] = task
        self._count_open(group, -len(chosen))
        self._set_first_step(group, oldest_first_step(group.first_step, version))
        return chosen

    def _set_first_step(self, group: SimulatedGroup, step: int | None) -> None:
        if step == group.first_step:
            return
        if group.require_step is None:
            if group.first_step is not None:
                self._begun[group.first_step] -= 1
                if not self._begun[group.first_step]:
                    del self._begun[group.first_step]
            if step is not None:
                self._begun[step] += 1
        group.first_step = step
        group.candidate = group.record = None

    def _count_open(self, group: SimulatedGroup, change: int) -> None:
        """Changes the number of a group's open tasks, and its place among the open groups."""
        before, after = group.num_open, group.num_open + change
        group.num_open, group.record = after, None
        self.num_open += change
        old = self._queue(group, before)
        new = self._queue(group, after)
        if old is new:
            return
        key = (group.ordinal, group.id, group)
        if old is not None:
            del old[bisect_left(old, key[:2], key=lambda entry: entry[:2])]
        if new is not None:
            insort(new, key, key=lambda entry: entry[:2])

    def _queue(self, group: SimulatedGroup, num_open: int) -> list[tuple[int, int, SimulatedGroup]] | None:
        if not num_open:
            return None
        return self._wholly_open if num_open == group.size else self._partly_open

    def held_by(self, worker: str) -> list[SimulatedTask]:
        return list(self._held[worker].values())

    def give_back(self, tasks: Iterable[SimulatedTask], *, untouched: bool = False) -> None:
        """Reopens leased tasks. `untouched`: their worker sampled no token, so any version may begin their group."""
        groups: dict[int, SimulatedGroup] = {}
        for task in tasks:
            if task.phase is TaskPhase.LEASED:
                self._release(task)
                task.phase = TaskPhase.OPEN
                self._count_open(task.group, 1)
                if untouched:
                    task.worker = None
                    groups[task.group.id] = task.group
        for group in groups.values():
            fresh = all(task.worker is None and not task.num_tokens for task in group.tasks)
            if group.phase == "open" and group.num_open == group.size and fresh:
                self._set_first_step(group, None)

    def lose(self, tasks: Sequence[SimulatedTask]) -> None:
        """Ends the leases of a worker that vanished; one of its tasks may be blamed."""
        lost = {task.id: task.num_losses for task in tasks if task.phase is TaskPhase.LEASED}
        blamed = culprit(lost)
        for task in tasks:
            if task.id not in lost:
                continue
            self.sums.wasted["worker lost"] += task.cut(task.num_kept)
            task.num_losses += 1
            task.group.is_plain = False
            self.suspects.add(task.id)
            if task.id == blamed:
                self.fail(task)
        self.give_back(tasks)

    def fail(self, task: SimulatedTask) -> None:
        """Counts a failed attempt."""
        task.num_failures += 1
        if not ends_task(task.num_failures, self.settings.max_attempts):
            return
        if task.phase is TaskPhase.OPEN:
            self._count_open(task.group, -1)
        elif task.phase is TaskPhase.LEASED:
            self._release(task)
        self.sums.wasted["task failed"] += task.cut(0)
        task.phase = TaskPhase.FAILED
        self.num_unfinished_tasks -= 1
        task.group.num_failed += 1
        self.settle(task.group)

    def _release(self, task: SimulatedTask) -> None:
        assert task.worker is not None
        self._held[task.worker].pop(task.id, None)

    # Submissions and rewards

    def submit(self, task: SimulatedTask, worker: str) -> str:
        """Stores an answer, whole or partial, with which `worker` holds the lease. Returns "stored", "partial" or
        "refused"."""
        if task.phase is not TaskPhase.LEASED or task.worker != worker:
            return "refused"
        self._release(task)
        task.num_kept = task.num_tokens
        if task.num_left:
            task.partial_of = worker
            task.group.is_plain = False
            task.phase = TaskPhase.OPEN
            self._count_open(task.group, 1)
            return "partial"
        task.phase = TaskPhase.ENDED
        self.num_unfinished_tasks -= 1
        self.suspects.discard(task.id)
        return "stored"

    def scored(self, task: SimulatedTask) -> bool:
        """Stores an answer's reward; returns whether this changed what a claim may find."""
        group = task.group
        group.num_scored += 1
        if group.phase != "open" or group.num_scored + group.num_failed < group.size:
            return False
        return self.settle(group)

    def settle(self, group: SimulatedGroup) -> bool:
        """Ends a group whose tasks have all ended, or of which too many have failed; returns whether it ended."""
        settings = self.settings
        match settle(group.size, group.num_scored, group.num_failed, settings.min_group):
            case GroupVerdict.OPEN:
                return False
            case GroupVerdict.FAILED:
                self._drop(group, "group failed")
                if may_retry(group.retry):
                    self._new_group(group.ordinal, retry=group.retry + 1, like=group)
                return True
        verdict = GroupVerdict.READY
        if settings.max_no_signal > 0:
            verdict = settle_ready(group.spread, self._num_no_signal, settings.max_no_signal)
        if verdict is GroupVerdict.NO_SIGNAL:
            self._num_no_signal += 1
            self._drop(group, "no signal")
            return True
        del self._unfinished[group.id]
        group.phase, group.ready_s, group.candidate = "ready", self._clock(), None
        key = self._key(group)
        insort(self._ready, (*key, group), key=lambda entry: entry[:2])
        if self._waits_for == group.id or self._last_key is None:
            self._ask_again = True
        elif key < self._last_key:
            self._num_older += 1
            self._ask_again |= self._num_older * ASKED_PER_BATCH >= settings.groups_per_step
        return True

    def _key(self, group: SimulatedGroup) -> tuple[float, int]:
        if self.baseline.takes_first_ready:
            return (group.ready_s, group.ordinal)
        first = group.first_step if group.first_step is not None else float("inf")
        return (0.0, group.ordinal) if self._in_order else (first, group.ordinal)

    def _drop(self, group: SimulatedGroup, cause: str) -> None:
        """Drops a group with all its tokens."""
        if group.phase == "open":
            del self._unfinished[group.id]
            if group.num_open:
                self._count_open(group, -group.num_open)
        else:
            self._ready.remove((*self._key(group), group))
        self._set_first_step_ended(group)
        group.phase = "dropped"
        self.num_alive -= 1
        self._ask_again = True
        self.num_groups_dropped[cause] += 1
        for task in group.tasks:
            self.num_unfinished_tasks -= task.phase in (TaskPhase.OPEN, TaskPhase.LEASED)
            if task.phase is TaskPhase.LEASED:
                self._release(task)
                # its worker still generates: what it has since the lease counts when it ends
                self.sums.wasted[cause] += task.num_kept
            else:
                self.sums.wasted[cause] += task.num_tokens
            task.phase = TaskPhase.FAILED

    def _set_first_step_ended(self, group: SimulatedGroup) -> None:
        if group.require_step is None and group.first_step is not None:
            self._begun[group.first_step] -= 1
            if not self._begun[group.first_step]:
                del self._begun[group.first_step]

    # Batches

    def ask_again(self) -> None:
        self._ask_again = True

    def claim(self, step: int) -> SimulatedBatch | None:
        """Returns the batch of `step`; None while it is incomplete."""
        settings = self.settings
        if len(self._ready) < settings.groups_per_step or not self._ask_again:
            return None
        if self.baseline.takes_first_ready:
            taken = [entry[2] for entry in self._ready[: settings.groups_per_step]]
            surplus = [entry[2] for entry in self._ready[settings.groups_per_step :]]
            if self.baseline.drops_surplus:
                for group in surplus:
                    self._drop(group, "surplus")
            return self._take(step, taken, bounded=False)
        last_ready: list[SimulatedGroup] = []

        def load() -> list[Candidate]:
            oldest = oldest_trainable_step(step, settings.max_staleness)
            first_ones, num_fresh = [], 0
            for _, _, group in self._ready:
                if self._in_order or group.first_step is None or group.first_step >= oldest:
                    if num_fresh == settings.groups_per_step:
                        continue
                    num_fresh += 1
                first_ones.append(group)
            last_ready[:] = first_ones
            unfinished = [group.candidate or self._candidate(group) for group in self._unfinished.values()]
            return [*unfinished, *(group.candidate or self._candidate(group) for group in first_ones)]

        def drop(stale: Sequence[int]) -> None:
            for number in stale:
                group = self._unfinished.get(number) or next(one for one in last_ready if one.id == number)
                again.append(group)
                self._drop(group, "group stale")

        again: list[SimulatedGroup] = []
        selection, _ = select_batch(
            load, drop, step, settings.groups_per_step, settings.max_staleness, in_order=self._in_order
        )
        for group in again:
            self._new_group(group.ordinal, like=group)
        if not selection.take:
            self._ask_again, self._num_older = bool(again), 0
            self._waits_for = selection.waits_for
            by_key = [self._key(group) for group in last_ready[: settings.groups_per_step]]
            self._last_key = by_key[-1] if len(by_key) == settings.groups_per_step else None
            return None
        by_id = {group.id: group for group in last_ready}
        return self._take(step, [by_id[number] for number in selection.take], bounded=True)

    def _candidate(self, group: SimulatedGroup) -> Candidate:
        is_ready = group.phase == "ready"
        runs: dict[int, int] = {}
        for task in group.tasks if is_ready else ():
            if task.phase is TaskPhase.ENDED:
                for version, count in task.runs:
                    runs[version] = runs.get(version, 0) + count
        found = tuple(VersionRun(count, version) for version, count in runs.items())
        group.candidate = Candidate(group.id, group.ordinal, is_ready, group.require_step, group.first_step, found)
        return group.candidate

    def _take(self, step: int, groups: Sequence[SimulatedGroup], *, bounded: bool) -> SimulatedBatch:
        bound = self.settings.max_staleness
        by_staleness: Counter[int] = Counter()
        num_trained = num_masked = num_prompt = num_over = num_answers = 0
        num_square = 0.0
        for group in groups:
            group.phase = "claimed"
            self._set_first_step_ended(group)
            for task in group.tasks:
                if task.phase is not TaskPhase.ENDED:
                    continue
                num_answers += 1
                num_prompt += task.num_prompt_tokens
                num_square += (task.num_prompt_tokens + task.num_tokens) ** 2
                oldest, masked_before = 0, num_masked
                for version, count in task.runs:
                    age = trained_staleness(version, step, bound) if bounded else step - version
                    if age is None:
                        num_masked += count
                        continue
                    by_staleness[age] += count
                    num_trained += count
                    oldest = max(oldest, age)
                num_over += oldest > bound
                bucket = task.length.bit_length()
                self.by_length[bucket] += task.num_tokens
                self.masked_by_length[bucket] += num_masked - masked_before
        taken = {group.id for group in groups}
        self._ready = [entry for entry in self._ready if entry[2].id not in taken]
        self.last_claimed = step
        self.claimed = SimulatedBatch(
            step, tuple(groups), num_answers, num_trained, num_prompt, num_square, by_staleness, num_masked, num_over
        )
        self.sums.trained += num_trained
        self.sums.masked += num_masked
        self._ask_again, self._waits_for, self._last_key = True, None, None
        self._num_no_signal = 0
        return self.claimed

    def commit(self, batch: SimulatedBatch) -> None:
        """Records that a batch was trained and its version published."""
        self.num_alive -= len(batch.groups)
        for group in batch.groups:
            group.phase = "trained"
        self.newest = batch.step + 1
        if self.claimed is batch:
            self.claimed = None
        self._ask_again = True

    # What is left

    def num_begin(self, step: int | None) -> int | None:
        if step is None:
            return None
        settings = self.settings
        claimed = self.last_claimed + 1 if self.last_claimed >= 0 else None
        unclaimed = unclaimed_step(self.newest, claimed)
        return may_begin(step, self._begun, unclaimed, settings.groups_per_step, settings.max_staleness)

    def waiting_tokens(self) -> tuple[int, int]:
        """Returns the tokens of answers that wait for a batch, and those of partial answers that the ledger has."""
        groups = [*self._unfinished.values(), *(entry[2] for entry in self._ready)]
        ended = sum(task.num_tokens for group in groups for task in group.tasks if task.phase is TaskPhase.ENDED)
        unfinished = (TaskPhase.OPEN, TaskPhase.LEASED)
        kept = sum(task.num_kept for group in groups for task in group.tasks if task.phase in unfinished)
        return ended, kept

    @property
    def num_ready(self) -> int:
        return len(self._ready)


class _View:
    """The open groups as one worker sees them."""

    def __init__(self, ledger: MemoryLedger, worker: str, version: int | None, is_alone: bool):
        self._ledger, self._worker, self._version = ledger, worker, version
        self._is_alone = is_alone

    def first(self, count: int) -> list[OpenGroup]:
        ledger = self._ledger
        found = [self._record(entry[2]) for entry in ledger._partly_open[:count]]
        if len(found) < count:
            found += [self._record(entry[2]) for entry in ledger._wholly_open[: count - len(found)]]
        return found

    def all(self) -> list[OpenGroup]:
        return self.first(len(self._ledger._unfinished))

    def num_open(self) -> int:
        return self._ledger.num_open

    def num_begin(self) -> int | None:
        return self._ledger.num_begin(self._version)

    def _record(self, group: SimulatedGroup) -> OpenGroup:
        if group.is_plain and group.record is not None:
            return group.record
        num_losses, is_away = 0, False
        if not group.is_plain:
            has_partial = has_own = False
            for task in group.tasks:
                if task.phase is TaskPhase.OPEN:
                    num_losses = max(num_losses, task.num_losses)
                    has_partial |= task.partial_of is not None
                    has_own |= task.partial_of == self._worker
            is_away = has_partial and not has_own and not self._is_alone
        group.record = OpenGroup(
            group.id,
            group.ordinal,
            False,
            group.size,
            group.num_open,
            group.require_version,
            num_losses,
            group.first_step,
            is_away,
        )
        return group.record
