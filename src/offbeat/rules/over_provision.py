"""The over-provision controller: chooses the number of groups in flight over those wanted this step.

It chooses the factor once a version, from predictions. The event model plays a dozen factors between 1 and S + 1, with
the step times and lengths learnt so far and with the groups that really survive; the controller takes the factor with
most tokens per second among those that keep 95 % of the tokens within the bound, and all keys and values within their
room.

A measured round is noisy and a prediction is repeatable, so predictions lead: they are averaged over versions, and
measured rounds correct them slowly, by the differences between neighbourhoods of factors.

Guarantees: the factor lies between 1 and S + 1. It is 1 while too few answers have ended, step times are unknown or
badly predicted, or the predicted gain is too small. It moves for a lead that is worth it: at once if the lead is large,
later if it is small but lasts; two equally good factors are never exchanged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from offbeat.rules.event_model import EventModelConfig, Outlook, Survivor, outlooks
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.step_time import StepTime

FORGET = 0.98
WIDTH = 0.4
"""Width of a neighbourhood, in the log of the factor."""
COMMON, OWN, NOISE = 0.2, 0.15, 0.3
"""Standard deviations of the log of a rate over its prediction: of all factors together, of one, and of one round."""
NUM_RECENT = 10


class PredictionErrors:
    """Errors of the logs of predicted rates, by factor.

    A model that is wrong by the same share everywhere still ranks factors rightly; one that flatters large factors does
    not. An error is taken as the sum of one common to all factors and one that changes smoothly with the factor, both
    estimated from measured rounds by Gaussian process regression. Errors are of sums over rounds, because a round whose
    batch was already there costs nothing, and the one before paid for both. One round corrects next to nothing."""

    def __init__(self, factors: Sequence[float]):
        logs = np.log(factors)
        self._prior = COMMON**2 + OWN**2 * np.exp(-0.5 * ((logs[:, None] - logs) / WIDTH) ** 2)
        self._num_rounds = np.zeros(len(logs))
        self._tokens, self._expected = np.zeros(len(logs)), np.zeros(len(logs))
        self._recent: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)

    @property
    def error(self) -> float:
        """Relative error over recent rounds together; 0 before there are any."""
        tokens, expected = (sum(column) for column in zip((0.0, 0.0), *self._recent, strict=True))
        return abs(tokens / expected - 1) if expected else 0.0

    @property
    def by_factor(self) -> np.ndarray:
        """Correction to the log of each factor's predicted rate."""
        seen = np.flatnonzero(self._num_rounds)
        errors = np.log(self._tokens[seen] / self._expected[seen])
        spread = self._prior[np.ix_(seen, seen)] + np.diag(NOISE**2 / self._num_rounds[seen])
        return self._prior[:, seen] @ np.linalg.solve(spread, errors)

    def note(self, index: int, tokens: float, seconds: float, predicted: float, predicted_s: float) -> None:
        """Records that a round gave `tokens` in `seconds`, with a `predicted` rate over `predicted_s`.

        It is weighted by the part of the predicted round that it took: cheap rounds come in series.
        """
        self._recent.append((tokens, predicted * seconds))
        part = min(seconds / predicted_s, 1.0)
        for sums, value in ((self._num_rounds, part), (self._tokens, tokens), (self._expected, predicted * seconds)):
            sums *= FORGET
            sums[index] += value


NUM_FACTORS = 12
MIN_ENDED = 24
"""Ended answers that the length model needs: fewer do not show the tail."""
MAX_FIT_ERROR = 0.15
KEEP_FIT_ERROR = 0.3
"""Allowed once the factor is above 1: a busy machine slows all factors alike."""
MIN_GAIN = 0.03
"""Gain over a factor of 1 that is worth older tokens."""
KEEP_GAIN = 0.015
"""Gain over a factor of 1 below which the factor returns to 1; lower than MIN_GAIN, so that it does not flutter."""
HYSTERESIS = 0.03
IDLE_LEAD = 0.01
"""Leads that never add up to a move: equally good factors differ by this from version to version."""
EARLY = 2.0
"""Extra factor on the required lead for the first prediction, which is off by several per cent; decays as 1/n as
predictions are averaged."""
TIE = 0.01
"""Among factors this close the smallest is taken: its tokens are fresher."""
MEMORY = 10
"""Versions over which predictions are averaged."""
MAX_NOTCHES = 6
"""Largest rise in one version, so that a far too bold first prediction is noticed halfway."""


class Fit(Protocol):
    """Step times of an engine or a fleet."""

    @property
    def model(self) -> StepTime | None: ...

    @property
    def error(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Factor for one version, and what is predicted of it."""

    factor: float
    reason: str
    """One line, for people."""
    predicted_tokens_per_s: float | None = None
    """None if nothing could be predicted."""
    predicted_step_s: float | None = None
    predicted_off_policy_share: float | None = None


class OverProvision:
    """Chooses the factor: call `decide` once a version, `outcome` once its round is over."""

    def __init__(self, setting: EventModelConfig, lengths: LengthEstimator, fit: Fit, *, seed: int = 0):
        self.setting, self.lengths, self.fit = setting, lengths, fit
        self.factors = _factors(setting)
        self.last = Decision(1.0, "nothing was decided yet")
        self.corrections = PredictionErrors(self.factors)
        self._seed, self._num_decided, self._num_averaged = seed, 0, 0
        self._gains = np.zeros(len(self.factors))
        """Averaged log of the predicted rate over that of the first factor."""
        self._index, self._leads = 0, np.zeros(len(self.factors))
        """Current factor, and the accumulated lead of each other factor over it."""
        self._has_moved = False
        """Whether the factor just changed: the first round at a new factor mixes both and corrects nothing."""
        self._unpredicted: list[tuple[float, float]] = []
        """Tokens and seconds of rounds at factor 1 before anything could be predicted, which serve as its
        measurements."""

    @property
    def error(self) -> float:
        """Relative error of predicted tokens per second over recent rounds together."""
        return self.corrections.error

    def decide(self, survivors: Sequence[Survivor] = (), update_s: float | None = None) -> Decision:
        """Factor for the round that begins, with its prediction; `update_s` replaces that of the configuration."""
        before, self._num_decided = self._index, self._num_decided + 1
        why_not = self._why_not()
        if why_not is not None or (step_time := self.fit.model) is None:
            self._move(0)
            self._num_averaged = 0
            self.last = Decision(1.0, why_not or "step times are not known yet")
        else:
            setting = self.setting if update_s is None else replace(self.setting, update_s=update_s)
            seed = self._seed + 1000 * self._num_decided
            seen = outlooks(setting, step_time, self.lengths.law(), self.factors, seed=seed, survivors=survivors)
            while self._unpredicted:
                self.corrections.note(0, *self._unpredicted.pop(), seen[0].tokens_per_s, seen[0].step_s)
            reason = self._choose(seen)
            best = seen[self._index]
            self.last = Decision(best.factor, reason, best.tokens_per_s, best.step_s, best.off_policy_share)
        self._has_moved = self._index != before
        return self.last

    def outcome(self, tokens: float, seconds: float) -> None:
        """Records a round: the tokens generated, and its seconds including the update after it."""
        rate, step_s = self.last.predicted_tokens_per_s, self.last.predicted_step_s
        if self._has_moved or tokens <= 0 or seconds <= 0:
            return
        if rate is None or step_s is None:
            self._unpredicted = [*self._unpredicted[-MEMORY:], (tokens, seconds)]
        else:
            self.corrections.note(self._index, tokens, seconds, rate, step_s)

    def _why_not(self) -> str | None:
        if len(self.factors) == 1:
            return f"max_staleness = {self.setting.max_staleness} leaves no room for more"
        if self.lengths.num_ended < MIN_ENDED:
            return f"too few answers have ended: {self.lengths.num_ended:.0f} of {MIN_ENDED}"
        if self.fit.model is None:
            return "step times are not known yet"
        allowed = MAX_FIT_ERROR if self._index == 0 else KEEP_FIT_ERROR
        if self.fit.error > allowed:
            return f"step times are predicted badly: {self.fit.error:.0%} off, {allowed:.0%} allowed"
        return None

    def _choose(self, seen: Sequence[Outlook]) -> str:
        """Moves to the best factor by the averaged predictions; returns the reason."""
        rates = np.log([outlook.tokens_per_s for outlook in seen])
        self._num_averaged = min(self._num_averaged + 1, MEMORY)
        self._gains += (rates - rates[0] - self._gains) / self._num_averaged
        gains = self._gains + self.corrections.by_factor - self.corrections.by_factor[0]
        allowed = np.array([self._is_allowed(outlook) for outlook in seen])
        allowed[0] = True
        gains = np.where(allowed, gains, -np.inf)
        best = int(np.flatnonzero(gains >= gains.max() - TIE)[0])
        if not allowed[self._index]:
            self._move(best)
            return "the factor before would pass the bound or the room for keys and values"
        caution = 1 + EARLY / self._num_averaged
        if gains.max() < (caution * MIN_GAIN if self._index == 0 else KEEP_GAIN):
            self._move(0)
            return f"over-provisioning would gain {max(gains.max(), 0):.1%}: too little"
        leads = gains - gains[self._index]
        self._leads = np.maximum(0.0, self._leads + leads - IDLE_LEAD)
        if max(leads[best], self._leads[best]) >= caution * HYSTERESIS:
            self._move(best)
            return f"{self.factors[best]:.2f} is predicted to gain {leads[best]:.1%}"
        return f"no other factor is predicted to gain {HYSTERESIS:.0%}"

    def _is_allowed(self, outlook: Outlook) -> bool:
        room = self.setting.max_context_tokens
        return outlook.staleness_p95 <= self.setting.max_staleness and (
            room is None or outlook.max_context_tokens <= room
        )

    def _move(self, index: int) -> None:
        self._index = min(index, self._index + MAX_NOTCHES)
        self._leads[:] = 0.0


def _factors(setting: EventModelConfig) -> list[float]:
    """About a dozen factors from 1 to S + 1, denser at the low end, each a whole number of groups."""
    num_groups = np.geomspace(1, setting.max_staleness + 1, NUM_FACTORS) * setting.groups_per_step
    return [float(num) / setting.groups_per_step for num in np.unique(np.rint(num_groups))]
