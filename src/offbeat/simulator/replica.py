"""A modelled engine: many answers that grow by one token each per decode step.

All rows (running answers) take each step together, so nothing happens between two changes of the rows, and the time of
the next change follows directly: the number of steps until the shortest row ends, times a step's duration, which grows
with the rows and their contexts. A change, such as a new row or a load of weights, takes effect at the end of the step
during which it comes, like in a real engine. A replica's `now_s` is the time of its latest change, and may therefore be
up to a step ahead of the simulation's clock.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.simulator.tasks import SimulatedTask

SAME = 1e-9
"""Rounding tolerance, in steps: a time this close to a step's end counts as the end."""


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds of an engine's work. `step_s` holds the seconds of a decode step by number of rows, without the reading
    of contexts. With more rows than it has entries, a step takes as long as its last two entries foretell."""

    step_s: tuple[float, ...]
    per_context_token_s: float = 0.0
    """Seconds that each token of context of each row adds to a step."""
    prefill_s: float = 0.0
    """Seconds per prefilled token."""
    prefill_square_s: float = 0.0
    """Seconds per squared length of a prefilled row, for attention."""
    load_s: float = 0.0
    """Seconds for which a load of new weights stops the engine."""

    def of(self, rows: int) -> float:
        if rows < len(self.step_s):
            return self.step_s[rows]
        last, before = self.step_s[-1], self.step_s[-2]
        return last + (rows - len(self.step_s) + 1) * (last - before)

    def fill_s(self, num_tokens: int) -> float:
        return num_tokens * (self.prefill_s + self.prefill_square_s * num_tokens)


def linear(base_s: float, per_row_s: float, slots: int, speed: float = 1.0) -> tuple[float, ...]:
    """Returns `EngineSpeed.step_s` of an engine whose steps take `base_s` + `per_row_s` × rows, divided by `speed`."""
    return tuple((base_s + per_row_s * rows) / speed for rows in range(slots + 2))


class Row:
    """A running answer. Its first token is sampled by step `first_step` + 1, its last by `last_step`."""

    __slots__ = ("context", "first_step", "is_gone", "kv_version", "last_step", "task")

    def __init__(self, task: SimulatedTask):
        self.task = task
        self.first_step = self.last_step = self.context = 0
        """`context` is the number of context tokens before the first step."""
        self.kv_version = 0
        self.is_gone = False


class Replica:
    """One engine. `capacity_tokens` is the room for keys and values. If the contexts of its rows exceed it, the row
    that began last is put back and computed again later (preemption). With `keeps_kv`, rows keep their keys and values
    across a load while these are at most `kv_lag` versions older than the weights."""

    def __init__(
        self, speed: EngineSpeed, *, capacity_tokens: float = math.inf, keeps_kv: bool = False, kv_lag: int = 0
    ):
        self.speed, self.capacity_tokens = speed, capacity_tokens
        self.keeps_kv, self.kv_lag = keeps_kv, kv_lag
        self.slowness = 1.0
        """Factor by which a straggler takes longer."""
        self.version: int | None = None
        self.now_s = 0.0
        self.num_rows = 0
        self.num_generated = self.num_prefilled = self.num_preempted = 0
        self.row_s = self.busy_s = 0.0
        """Row seconds and busy seconds up to `now_s`."""
        self.waiting: deque[Row] = deque()
        """Rows that were preempted, or found no room."""
        self._step, self._context, self._fill_s = 0, 0, 0.0
        self._ends: list[tuple[int, int, Row]] = []
        self._rows: dict[int, Row] = {}
        """Running rows by task id, in the order in which they began."""
        self._versions: list[tuple[int, int]] = []
        self.loaded_from_s = 0.0
        """Time at which the latest load began."""
        self._num_added = 0

    @property
    def num_requests(self) -> int:
        return self.num_rows + len(self.waiting)

    def due_s(self) -> float:
        """Returns the time of the next change that comes by itself; infinity: none."""
        if not self.num_rows:
            return math.inf
        steps = self._steps_due()
        return self.now_s + self._duration_s(steps) if steps > 0 else self.now_s

    def advance(self, time_s: float) -> list[Row]:
        """Carries out the change that is due at `time_s`; returns the rows that ended. Does nothing if none is due."""
        due_s = self.due_s()
        if due_s > time_s + 1e-12 * abs(time_s):
            return []
        ended = self.interrupt(time_s)
        self._admit_waiting()
        return ended

    def interrupt(self, time_s: float) -> list[Row]:
        """Goes to the end of the step that runs at `time_s`; returns the rows that have ended by then."""
        if not self.num_rows:
            self.now_s = max(self.now_s, time_s)
            return []
        if time_s > self.now_s:
            self._go(min(self._steps_until(time_s), self._steps_due()))
        ended = []
        ends = self._ends
        while ends and (ends[0][0] <= self._step or ends[0][2].is_gone):
            _, _, row = heapq.heappop(ends)
            if not row.is_gone:
                self._remove(row)
                ended.append(row)
        self._preempt()
        return ended

    def add(self, tasks: Iterable[SimulatedTask], time_s: float) -> list[Row]:
        """Starts answers, or continues partial ones; returns the rows that ended meanwhile."""
        ended = self.interrupt(time_s)
        for task in tasks:
            self.waiting.append(Row(task))
        self._admit_waiting()
        return ended

    def load(self, version: int, time_s: float) -> list[Row]:
        """Loads a version at the end of the present step; returns the rows that ended by then, at `loaded_from_s`."""
        ended = self.interrupt(time_s)
        self.loaded_from_s = self.now_s
        self.now_s += self.speed.load_s
        self.version = version
        oldest = min((row.first_step for row in self._rows.values()), default=self._step)
        kept = [pair for pair in self._versions if pair[0] >= oldest]
        before = [pair for pair in self._versions if pair[0] < oldest]
        self._versions = [*before[-1:], *kept, (self._step, version)]
        self._fill_s = 0.0
        for row in self._rows.values():
            if self.keeps_kv and version - row.kv_version <= self.kv_lag:
                continue
            row.kv_version = version
            self._fill(row.context + self._step - row.first_step)
        self._admit_waiting()
        return ended

    def abort_all(self, time_s: float) -> tuple[list[Row], list[Row]]:
        """Ends all rows at the end of the present step. Returns the rows that ended by themselves, and the others."""
        ended = self.interrupt(time_s)
        stopped = list(self._rows.values())
        for row in stopped:
            self._remove(row)
        stopped += self.waiting
        self.waiting.clear()
        return ended, stopped

    def kill(self, time_s: float) -> list[Row]:
        """Ends the engine at once; returns its rows, whose tokens are lost."""
        if self.num_rows and time_s > self.now_s:
            self._go(self._steps_done(time_s))
        self.now_s = max(self.now_s, time_s)
        rows = [*self._rows.values(), *self.waiting]
        for row in list(self._rows.values()):
            self._remove(row)
        self.waiting.clear()
        return rows

    def held_tokens(self) -> int:
        """Returns the tokens of all rows that no task records yet."""
        return sum(self._step - row.first_step for row in self._rows.values())

    # Steps

    def _steps_due(self) -> int:
        """Returns the number of steps until a row ends, or until the contexts do not fit any more."""
        ends = self._ends
        while ends[0][2].is_gone:
            heapq.heappop(ends)
        steps = ends[0][0] - self._step
        if self.num_rows > 1 and self.capacity_tokens < math.inf:
            steps = min(steps, int((self.capacity_tokens - self._context) // self.num_rows))
        return max(steps, 0)

    def _duration_s(self, steps: int) -> float:
        rows, per_token_s = self.num_rows, self.speed.per_context_token_s
        seconds = steps * self.speed.of(rows)
        if per_token_s:
            seconds += per_token_s * (steps * self._context + rows * steps * (steps - 1) / 2)
        return self._fill_s + seconds * self.slowness

    def _real_steps(self, time_s: float) -> float:
        """Returns the number of steps that fit between `now_s` and `time_s`, as a fraction."""
        left_s = (time_s - self.now_s - self._fill_s) / self.slowness
        if left_s <= 0:
            return 0.0
        per_token_s = self.speed.per_context_token_s
        square = per_token_s * self.num_rows / 2
        once = self.speed.of(self.num_rows) + per_token_s * self._context - square
        if square <= 0:
            return left_s / once
        return 2 * left_s / (once + math.sqrt(once * once + 4 * square * left_s))

    def _steps_until(self, time_s: float) -> int:
        return max(1, math.ceil(self._real_steps(time_s) - SAME))

    def _steps_done(self, time_s: float) -> int:
        return math.floor(self._real_steps(time_s) + SAME)

    def _go(self, steps: int) -> None:
        seconds = self._duration_s(steps)
        self.now_s += seconds
        self.busy_s += seconds
        self.row_s += seconds * self.num_rows
        self.num_generated += steps * self.num_rows
        self._context += steps * self.num_rows
        self._step += steps
        self._fill_s = 0.0

    # Rows

    def _fill(self, num_tokens: int) -> None:
        self._fill_s += self.speed.fill_s(num_tokens) * self.slowness
        self.num_prefilled += num_tokens

    def _admit_waiting(self) -> None:
        while self.waiting:
            task = self.waiting[0].task
            context = task.num_prompt_tokens + task.num_tokens
            if self.num_rows and self._context + context + self.num_rows + 1 > self.capacity_tokens:
                return
            row = self.waiting.popleft()
            row.first_step, row.last_step = self._step, self._step + task.num_left
            row.context, row.kv_version, row.is_gone = context, self.version or 0, False
            self._rows[task.id] = row
            self.num_rows += 1
            self._context += context
            self._fill(context)
            self._num_added += 1
            heapq.heappush(self._ends, (row.last_step, self._num_added, row))

    def _preempt(self) -> None:
        while self.num_rows > 1 and self._context + self.num_rows > self.capacity_tokens:
            row = next(reversed(self._rows.values()))
            self._remove(row)
            again = Row(row.task)
            self.waiting.appendleft(again)
            self.num_preempted += 1

    def _remove(self, row: Row) -> None:
        """Ends a row and records its tokens, by version, in its task."""
        row.is_gone = True
        del self._rows[row.task.id]
        self.num_rows -= 1
        steps = self._step - row.first_step
        self._context -= row.context + steps
        if steps:
            self._record(row.task, row.first_step)

    def _record(self, task: SimulatedTask, start: int) -> None:
        end = self._step
        found: list[tuple[int, int]] = []
        for step, version in reversed(self._versions):
            begin = step if step > start else start
            if end > begin:
                found.append((version, end - begin))
                end = begin
            if step <= start:
                break
        for version, count in reversed(found):
            task.grow(version, count)
