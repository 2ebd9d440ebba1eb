"""Feeds the over-provision controller of a run whose work comes in rounds, and lets it choose.

Lengths are learnt from what workers hand in, step times from what they tell of their engines, what survives is read off
the ledger. A choice takes some tens of milliseconds, so that where rounds are short it is made every few of them.

Guarantees: nothing here outlives the process or needs to: without it the factor is 1 until enough was seen again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from offbeat.control.fleet import FleetFit
from offbeat.control.lengths import Lengths
from offbeat.control.over_provision import Decision, OverProvision
from offbeat.control.rounds import Setting, Survivor
from offbeat.control.step_time import Timing
from offbeat.ledger.records import Surviving
from offbeat.serve.provisioning import Overlapped, Provisioning
from offbeat.trajectory import Task, Trajectory

MAX_TASKS = 100_000
"""Under way at most; of one that came to nothing nobody tells."""
MAX_SHARE = 0.02
"""Of the time, what choosing may take, after the first of it."""
UNRATIONED_S = 1.0
"""So much choosing is never put off: a run that is short of rounds is also short of time to find its factor in."""
NUM_UPDATES = 8
"""Updates whose median is taken for the next one's length."""


class Foresight(Provisioning):
    """See the module; `on_choice` hears of every other factor, and why."""

    wants_survivors = True

    def __init__(
        self,
        setting: Setting,
        max_new_tokens: int,
        on_choice: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(1.0)
        self._clock, self._on_choice = clock, on_choice
        self._lengths, self._fit = Lengths(max_new_tokens), FleetFit()
        self._control = OverProvision(setting, self._lengths, self._fit)
        self._groups: dict[int, tuple[int, int]] = {}
        """Group and tokens of each task under way when it was handed out."""
        self._num_tokens, self._is_mixed = 0, False
        """Generated in this round; and whether anything was evaluated in it."""
        self._num_prompts = self._num_prompt_tokens = 0
        self._began_s: float | None = None
        self._claimed_s: float | None = None
        self._updates_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._choice_s = self._choices_s = self._rounds_s = 0.0
        """What the last choice took, and all of them, and how long rounds have lasted since the last."""
        self._outcome_tokens_per_s: float | None = None

    def handed_out(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task.require_version is not None:
                self._is_mixed = True
                continue
            num_tokens = 0 if task.prefix is None else task.prefix.num_tokens
            self._groups[task.id] = task.group, num_tokens
            self._lengths.running(task.id, None, num_tokens, task.group)
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
            self._lengths.running(trajectory.task, None, num_tokens, group)
        else:
            self._lengths.finished(trajectory.task, None, num_tokens, group)

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
        told = {
            "over_provision": self._factor,
            "predicted_tokens_per_second": self._control.last.predicted_tokens_per_s,
            "predicted_step_s": self._control.last.predicted_step_s,
            "predicted_off_policy_share": self._control.last.predicted_off_policy_share,
            "generated_tokens_per_second": self._outcome_tokens_per_s,
            "step_time_error": self._fit.error if self._fit.model is not None else None,
        }
        return {name: value for name, value in told.items() if value is not None}


def provisioning_of(
    told: float | Literal["auto"],
    overlapped: int | None,
    rounds: Setting | None,
    max_new_tokens: int,
    on_choice: Callable[[Decision], None],
) -> Provisioning:
    """What a run takes its factor from: `overlapped` is the bound of one whose work overlaps with training, `rounds`
    what is known of one whose work comes in rounds; without either every group is wanted."""
    if told != "auto":
        return Provisioning(told)
    if overlapped is not None:
        return Overlapped(overlapped)
    return Provisioning(1.0) if rounds is None else Foresight(rounds, max_new_tokens, on_choice)
