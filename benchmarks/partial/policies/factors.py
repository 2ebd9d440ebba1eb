"""Where the over-provision factor of a round comes from: a constant, or the controller that a real run uses.

`Automatic` feeds `control/over_provision` what a coordinator would: how long steps took, how far every sample got, and
who survives. It decides while the weights are updated. Lengths of samples that have not ended are unknown to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from benchmarks.partial.engines import Counts, Engine
from benchmarks.partial.rollouts import Rollouts
from benchmarks.partial.samples import Group
from offbeat.rules.event_model import EventModelConfig, Survivor
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.over_provision import OverProvision
from offbeat.rules.step_time import StepTimeFit, Timing

STEPS_PER_TIMING = 8
"""Intervals are no shorter: some ten to twenty of a round are told to the fit, as workers report several times."""


class Factor(Protocol):
    value: float

    def watch(self, engine: Engine) -> None:
        """Something ended."""

    def think(self, rollouts: Rollouts, alive: Sequence[Group]) -> None:
        """A round is over; chooses the value for the next."""


class Fixed:
    def __init__(self, value: float):
        self.value = value

    def watch(self, engine: Engine) -> None: ...

    def think(self, rollouts: Rollouts, alive: Sequence[Group]) -> None: ...


class Automatic:
    """See the module."""

    def __init__(self, setting: EventModelConfig, max_tokens: int):
        self.lengths, self.fit = LengthEstimator(max_tokens), StepTimeFit()
        self.control = OverProvision(setting, self.lengths, self.fit)
        self.value = 1.0
        self._counts, self._now_s = Counts(), 0.0
        self._timings: list[Timing] = []
        """Of this round; the fit hears of them when it is over, since it runs beside the engine and not in its way."""
        self._round_began = (0, 0.0)
        """Tokens generated and seconds passed before it."""

    def watch(self, engine: Engine) -> None:
        if engine.counts.num_steps - self._counts.num_steps >= STEPS_PER_TIMING:
            self._time(engine)

    def think(self, rollouts: Rollouts, alive: Sequence[Group]) -> None:
        engine = rollouts.engine
        self._time(engine)
        for timing in self._timings:
            self.fit.observe(timing)
        self._timings.clear()
        self._tell_lengths(rollouts)
        before_tokens, before_s = self._round_began
        ends_s = engine.now_s + rollouts.update_s
        self.control.outcome(engine.counts.num_rows - before_tokens, ends_s - before_s)
        self._round_began = engine.counts.num_rows, ends_s
        self.value = self.control.decide(_survivors(rollouts, alive)).factor
        self._now_s = ends_s

    def _time(self, engine: Engine) -> None:
        """One more interval of the engine's work."""
        now_s, counts = engine.now_s, replace(engine.counts)
        before, self._counts = self._counts, counts
        timing = Timing(
            counts.num_steps - before.num_steps,
            counts.num_rows - before.num_rows,
            counts.num_context_tokens - before.num_context_tokens,
            counts.num_prefilled_tokens - before.num_prefilled_tokens,
            now_s - self._now_s,
        )
        self._now_s = now_s
        self._timings.append(timing)

    def _tell_lengths(self, rollouts: Rollouts) -> None:
        for sample in rollouts.ran:
            report = self.lengths.finished if sample.is_done else self.lengths.running
            number = sample.group.number
            report((number, sample.member), sample.num_tokens, number)
        self.lengths.advance()


def _survivors(rollouts: Rollouts, alive: Sequence[Group]) -> list[Survivor]:
    """Returns the groups that continue in the next round, with their age and the state of their samples."""
    next_version = rollouts.version + 1
    return [
        Survivor(
            next_version - group.oldest_version,
            tuple(sample.num_tokens for sample in group.samples),
            tuple(sample.is_done for sample in group.samples),
        )
        for group in alive
        if group.oldest_version is not None
    ]
