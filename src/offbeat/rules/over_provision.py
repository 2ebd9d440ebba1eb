"""The over-provision controller: chooses the factor, which is groups in flight divided by groups that a step trains.

Once per version, the event model simulates a dozen factors with the engines' step times and the answer lengths learnt
so far, and with the actual unfinished groups. A factor is allowed if 95 % of the tokens keep within the bound S
(`max_staleness`), and all running answers fit into the KV cache. Of the allowed factors, the controller takes the one
with the most tokens per second. Measured rounds are noisy and predictions are repeatable, so the choice rests on
predictions, which measured rounds correct slowly.

Guarantees: the factor lies between 1 and S + 1. It is 1 while too few answers have ended, step times are unknown or
badly predicted, or the predicted gain is too small. The factor changes at once if another factor has a large predicted
lead, and later if a small lead lasts; it never alternates between equally good factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from offbeat.rules.event_model import EventModelConfig, Outlook, Survivor, outlooks
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.step_time import StepTime

FORGET = 0.98
WIDTH = 0.4
"""Distance between the logs of two over-provision factors over which their prediction errors are similar."""
COMMON, OWN, NOISE = 0.2, 0.15, 0.3
"""Standard deviations of three parts of log(measured / predicted tokens per second): the part common to all factors,
the part of one factor, and the noise of one round."""


class PredictionErrors:
    """Errors of the predicted tokens per second, as logs of measured over predicted, by over-provision factor.

    A model that is wrong by the same ratio everywhere still ranks factors correctly; one that favours large factors
    does not. So an error is modelled as a part common to all factors plus a part that changes smoothly with the factor.
    Both are estimated from measured rounds by Gaussian process regression. Tokens and seconds are summed over rounds,
    because a round whose batch was complete from the start takes no time: its answers were generated in the round
    before."""

    def __init__(self, factors: Sequence[float]):
        logs = np.log(factors)
        self._prior = COMMON**2 + OWN**2 * np.exp(-0.5 * ((logs[:, None] - logs) / WIDTH) ** 2)
        self._num_rounds = np.zeros(len(logs))
        self._tokens, self._expected = np.zeros(len(logs)), np.zeros(len(logs))

    @property
    def by_factor(self) -> np.ndarray:
        """Correction to add to the log of the tokens per second predicted for each factor."""
        seen = np.flatnonzero(self._num_rounds)
        errors = np.log(self._tokens[seen] / self._expected[seen])
        spread = self._prior[np.ix_(seen, seen)] + np.diag(NOISE**2 / self._num_rounds[seen])
        return self._prior[:, seen] @ np.linalg.solve(spread, errors)

    def note(self, index: int, tokens: float, seconds: float, predicted: float, predicted_s: float) -> None:
        """Records that a round with the factor at `index` gave `tokens` in `seconds`, where `predicted` tokens per
        second and `predicted_s` seconds were predicted.

        A round shorter than predicted counts less, in proportion, because short rounds come in series.
        """
        part = min(seconds / predicted_s, 1.0)
        for sums, value in ((self._num_rounds, part), (self._tokens, tokens), (self._expected, predicted * seconds)):
            sums *= FORGET
            sums[index] += value


NUM_FACTORS = 12
MIN_ENDED = 24
"""Number of ended answers that the length model needs; fewer do not show the tail of the distribution."""
MAX_FIT_ERROR = 0.15
KEEP_FIT_ERROR = 0.3
"""Largest error of predicted step times at which a factor above 1 is kept; larger than MAX_FIT_ERROR, because a busy
machine slows all factors alike."""
MIN_GAIN = 0.03
"""Smallest predicted gain in speed over a factor of 1 that is worth training on older tokens."""
KEEP_GAIN = 0.015
"""Gain over factor 1 below which the factor falls back to 1; lower than MIN_GAIN, so that it does not alternate."""
HYSTERESIS = 0.03
IDLE_LEAD = 0.01
"""Part of a factor's predicted lead over the current factor that is not accumulated from version to version: equally
good factors differ this much by chance."""
EARLY = 2.0
"""With n predictions averaged, the required gain and lead are multiplied by 1 + EARLY / n, because an average of few
predictions is off by several per cent."""
TIE = 0.01
"""Largest difference of two gains that counts as none. Among the best factors the smallest is taken, because its tokens
are fresher."""
MEMORY = 10
"""Number of versions over which predictions are averaged."""
MAX_NOTCHES = 6
"""Largest rise of the factor per version, counted in entries of the list `factors`. So a first prediction that is far
too optimistic can be corrected by a measured round before the factor reaches its largest value."""


class Fit(Protocol):
    """Model of the step times of one or several engines (None: not known yet), and the relative error of its recent
    predictions."""

    @property
    def model(self) -> StepTime | None: ...

    @property
    def error(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """Over-provision factor for the round of one version, and what is predicted for that round."""

    factor: float
    reason: str
    """Explanation in one line, for people."""
    predicted_tokens_per_s: float | None = None
    """None if nothing could be predicted; the other predictions are then None too."""
    predicted_step_s: float | None = None
    predicted_off_policy_share: float | None = None


class OverProvision:
    """Chooses the over-provision factor (groups in flight divided by groups that a step trains). `decide` is called
    once per version, and `outcome` after the version's round."""

    def __init__(self, setting: EventModelConfig, lengths: LengthEstimator, fit: Fit, *, seed: int = 0):
        self.setting, self.lengths, self.fit = setting, lengths, fit
        self.factors = _factors(setting)
        self.last = Decision(1.0, "nothing was decided yet")
        self.corrections = PredictionErrors(self.factors)
        self._seed, self._num_decided, self._num_averaged = seed, 0, 0
        self._gains = np.zeros(len(self.factors))
        """For each factor, log(predicted tokens per second / those predicted for factor 1), averaged over versions."""
        self._index, self._leads = 0, np.zeros(len(self.factors))
        """Index of the current factor in `factors`, and the accumulated lead of each factor over the current one."""
        self._has_moved = False
        """Whether the last decision changed the factor. The round after a change mixes both factors and is not
        recorded."""
        self._unpredicted: list[tuple[float, float]] = []
        """Tokens and seconds of rounds for which nothing was predicted, all at factor 1; recorded as measurements of
        factor 1 at the next prediction."""

    def decide(self, survivors: Sequence[Survivor] = (), update_s: float | None = None) -> Decision:
        """Returns the factor for the round that begins, with its prediction. `survivors` are the unfinished groups that
        continue in it; `update_s`, if given, replaces the seconds between rounds in `setting`."""
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
        """Records a finished round: the tokens generated, and the seconds including the update after it. Ignores a
        round for which the factor was changed."""
        rate, step_s = self.last.predicted_tokens_per_s, self.last.predicted_step_s
        if self._has_moved or tokens <= 0 or seconds <= 0:
            return
        if rate is None or step_s is None:
            self._unpredicted = [*self._unpredicted[-MEMORY:], (tokens, seconds)]
        else:
            self.corrections.note(self._index, tokens, seconds, rate, step_s)

    def _why_not(self) -> str | None:
        if len(self.factors) == 1:
            return f"max_staleness = {self.setting.max_staleness} leaves no room for more groups in flight"
        if self.lengths.num_ended < MIN_ENDED:
            return f"too few answers have ended: {self.lengths.num_ended:.0f} of {MIN_ENDED}"
        if self.fit.model is None:
            return "step times are not known yet"
        allowed = MAX_FIT_ERROR if self._index == 0 else KEEP_FIT_ERROR
        if self.fit.error > allowed:
            return f"step times are predicted badly: {self.fit.error:.0%} off, {allowed:.0%} allowed"
        return None

    def _choose(self, seen: Sequence[Outlook]) -> str:
        """Changes to the factor that is best by the averaged predictions, if it leads the current one by enough;
        returns the reason."""
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
            return "the previous factor would exceed max_staleness or the KV cache"
        caution = 1 + EARLY / self._num_averaged
        if gains.max() < (caution * MIN_GAIN if self._index == 0 else KEEP_GAIN):
            self._move(0)
            return f"over-provisioning would gain too little: {max(gains.max(), 0):.1%}"
        leads = gains - gains[self._index]
        self._leads = np.maximum(0.0, self._leads + leads - IDLE_LEAD)
        if max(leads[best], self._leads[best]) >= caution * HYSTERESIS:
            self._move(best)
            return f"factor {self.factors[best]:.2f} is predicted to gain {leads[best]:.1%}"
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
    """Returns up to `NUM_FACTORS` factors from 1 to max_staleness + 1, denser at the low end, each of which gives a
    whole number of groups."""
    num_groups = np.geomspace(1, setting.max_staleness + 1, NUM_FACTORS) * setting.groups_per_step
    return [float(num) / setting.groups_per_step for num in np.unique(np.rint(num_groups))]
