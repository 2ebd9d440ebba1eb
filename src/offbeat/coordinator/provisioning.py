"""The over-provision factor: groups under way over groups that a step trains.

A configured number is used as it is. Otherwise the factor is chosen when a version is published and kept until the
next: where work overlaps with training by the trainer's idle time (`Depth`), in rounds by the predictions of the event
model (`rules.over_provision`). Nothing here outlives the process: after a restart the factor starts over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from offbeat.ledger.records import Surviving
from offbeat.rules.event_model import EventModelConfig, Survivor
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.over_provision import Decision, OverProvision
from offbeat.rules.step_time import FleetFit, Timing
from offbeat.trajectory import Task, Trajectory

MAX_STILL = 0.05
"""Share of a step for which the trainer may be idle."""
FIRST_PATIENCE, MAX_PATIENCE = 4, 128
"""Calm steps before a smaller depth is tried."""


class Depth:
    """Steps that workers should be ahead of the trainer, between 1 and `max_staleness`: as few as keep it busy, so that
    tokens are as fresh as possible.

    The depth rises by one when the trainer was idle for a noticeable part of a step, and falls by one after a while of
    calm. A depth that proved too small is tried again ever more seldom. Report every step; `steps` is for the next.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness, self.steps = max_staleness, min(1, max_staleness)
        self._patience, self._num_calm, self._is_trial = FIRST_PATIENCE, 0, False

    def trained(self, still_s: float, step_s: float) -> None:
        """A step took `step_s`, of which the trainer waited `still_s` for its batch."""
        if still_s > MAX_STILL * step_s:
            if self._is_trial:
                self._patience = min(2 * self._patience, MAX_PATIENCE)
            self.steps = min(self.steps + 1, self.max_staleness)
            self._num_calm, self._is_trial = 0, False
            return
        self._num_calm += 1
        if self._num_calm >= self._patience and self.steps > 1:
            self.steps -= 1
            self._num_calm, self._is_trial = 0, True


class Provisioning:
    """A configured factor. Subclasses choose one from the events that they are notified of."""

    wants_survivors = False
    """Whether `began` uses its survivors."""

    def __init__(self, factor: float):
        self._factor = factor

    def factor(self) -> float:
        return self._factor

    def handed_out(self, tasks: Sequence[Task]) -> None:
        """Workers leased tasks."""

    def submitted(self, trajectory: Trajectory) -> None:
        """A trajectory, whole or partial, was stored."""

    def timed(self, worker: str, timings: Sequence[Timing]) -> None:
        """A worker's engine reported step times."""

    def left(self, worker: str) -> None:
        """A worker left."""

    def claimed(self) -> None:
        """The batch of the step under way is complete."""

    def began(self, step: int, num_slots: int, survivors: Sequence[Surviving]) -> None:
        """The version of a step was published: from now on that step's work is under way."""

    def trained(self, still_s: float, step_s: float) -> None:
        """A step took `step_s`, of which the trainer waited `still_s` for its batch."""

    def figures(self) -> dict[str, float]:
        """Metrics for the step's row."""
        return {"over_provision": self._factor}


class Overlapped(Provisioning):
    """A factor for work that overlaps with training: as far ahead of the trainer as it needs."""

    def __init__(self, max_staleness: int):
        self._depth = Depth(max_staleness)
        super().__init__(1.0 + self._depth.steps)

    def began(self, step: int, num_slots: int, survivors: Sequence[Surviving]) -> None:
        self._factor = 1.0 + self._depth.steps

    def trained(self, still_s: float, step_s: float) -> None:
        self._depth.trained(still_s, step_s)


MAX_TASKS = 100_000
"""Most tasks under way; tasks that fail are not reported here."""
MAX_SHARE = 0.02
"""Upper bound on choosing time as a fraction of round time, after the first UNRATIONED_S."""
UNRATIONED_S = 1.0
"""Choosing time that is never put off: a run with few rounds has little time to find its factor."""
NUM_UPDATES = 8
"""Updates whose median predicts the next one's duration."""


class OverProvisionController(Provisioning):
    """A factor for work in rounds, chosen by the event model. Lengths are learnt from trajectories, step times from
    workers' reports, survivors from the ledger. A choice takes tens of milliseconds, so short rounds share one.
    `on_choice` gets every change, with its reason."""

    wants_survivors = True

    def __init__(
        self,
        setting: EventModelConfig,
        max_new_tokens: int,
        on_choice: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(1.0)
        self._clock, self._on_choice = clock, on_choice
        self._lengths, self._fit = LengthEstimator(max_new_tokens), FleetFit()
        self._control = OverProvision(setting, self._lengths, self._fit)
        self._groups: dict[int, tuple[int, int]] = {}
        """By task under way: its group, and its tokens when it was handed out."""
        self._num_tokens, self._is_mixed = 0, False
        """Tokens generated in this round, and whether it contains evaluation."""
        self._num_prompts = self._num_prompt_tokens = 0
        self._began_s: float | None = None
        self._claimed_s: float | None = None
        self._updates_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._choice_s = self._choices_s = self._rounds_s = 0.0
        """Seconds of the last choice, of all choices, and of the rounds since the last."""
        self._outcome_tokens_per_s: float | None = None

    def handed_out(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task.require_version is not None:
                self._is_mixed = True
                continue
            num_tokens = 0 if task.prefix is None else task.prefix.num_tokens
            self._groups[task.id] = task.group, num_tokens
            self._lengths.running(task.id, num_tokens, task.group)
            self._num_prompts += 1
            self._num_prompt_tokens += len(task.prompt)
        while len(self._groups) > MAX_TASKS:
            oldest = next(iter(self._groups))
            del self._groups[oldest]
            self._lengths.dropped(oldest)

    def submitted(self, trajectory: Trajectory) -> None:
        if trajectory.task not in self._groups:
            return  # evaluation, or handed out before this process began
        group, num_before = self._groups.pop(trajectory.task)
        num_tokens = trajectory.num_tokens
        self._num_tokens += num_tokens - num_before
        if trajectory.is_partial:
            self._lengths.running(trajectory.task, num_tokens, group)
        else:
            self._lengths.finished(trajectory.task, num_tokens, group)

    def timed(self, worker: str, timings: Sequence[Timing]) -> None:
        self._fit.observe(worker, timings)

    def left(self, worker: str) -> None:
        self._fit.left(worker)

    def claimed(self) -> None:
        self._claimed_s = self._clock()

    def began(self, step: int, num_slots: int, survivors: Sequence[Surviving]) -> None:
        now_s = self._clock()
        self._end_round(now_s)
        self._lengths.advance()
        if self._choices_s > UNRATIONED_S and self._rounds_s * MAX_SHARE < self._choice_s:
            return
        prompt_tokens = self._num_prompt_tokens / max(self._num_prompts, 1)
        setting = replace(self._control.setting, slots=num_slots or None, prompt_tokens=prompt_tokens)
        self._control.setting = setting
        update_s = median(self._updates_s) if self._updates_s else 0.0
        carried = [Survivor(max(step - group.first_step, 1), group.num_tokens, group.ended) for group in survivors]
        decision = self._control.decide(carried, update_s)
        self._choice_s, self._rounds_s = self._clock() - now_s, 0.0
        self._choices_s += self._choice_s
        if decision.factor != self._factor:
            self._factor = decision.factor
            self._on_choice(decision)

    def _end_round(self, now_s: float) -> None:
        if self._began_s is not None:
            round_s = now_s - self._began_s
            self._rounds_s += round_s
            self._outcome_tokens_per_s = self._num_tokens / round_s if round_s > 0 else None
            if not self._is_mixed:
                self._control.outcome(self._num_tokens, round_s)
            if self._claimed_s is not None:
                self._updates_s.append(now_s - self._claimed_s)
        self._began_s, self._claimed_s = now_s, None
        self._num_tokens, self._is_mixed = 0, False

    def figures(self) -> dict[str, float]:
        figures = {
            "over_provision": self._factor,
            "predicted_tokens_per_second": self._control.last.predicted_tokens_per_s,
            "predicted_step_s": self._control.last.predicted_step_s,
            "predicted_off_policy_share": self._control.last.predicted_off_policy_share,
            "generated_tokens_per_second": self._outcome_tokens_per_s,
            "step_time_error": self._fit.error if self._fit.model is not None else None,
        }
        return {name: value for name, value in figures.items() if value is not None}


def provisioning_of(
    configured: float | Literal["auto"],
    overlapped: int | None,
    rounds: EventModelConfig | None,
    max_new_tokens: int,
    on_choice: Callable[[Decision], None],
) -> Provisioning:
    """The source of a run's factor. `overlapped` is the bound of a run that overlaps work with training, `rounds` the
    event model of one that works in rounds; with neither, the factor is 1."""
    if configured != "auto":
        return Provisioning(configured)
    if overlapped is not None:
        return Overlapped(overlapped)
    return Provisioning(1.0) if rounds is None else OverProvisionController(rounds, max_new_tokens, on_choice)
