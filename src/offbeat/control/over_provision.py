"""How many groups should be in flight over those wanted this step.

Duty: choose the over-provision factor, once a version, before anything is tried. A handful of factors between 1 and
S + 1 is played through by the event model, with the step times and the lengths learnt so far and from the groups that
really survive; the one that generates most tokens a second is taken, of those that keep 95 % of the tokens within the
bound and all keys and values within their room.

One round is a noisy sample and a prediction is a repeatable one, so predictions lead: they are averaged over versions,
and what rounds really gave corrects them slowly, by the difference between neighbourhoods of factors.

Guarantees: the factor lies between 1 and S + 1. It is 1 while too little has ended, step times are not known or are
predicted badly, or over-provisioning is predicted to gain too little. It moves for a lead that is worth it, at once if
the lead is large and later if it is small but lasts; two factors as good as each other are never exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from offbeat.control.corrections import Corrections
from offbeat.control.lengths import Lengths
from offbeat.control.rounds import Outlook, Setting, Survivor, outlooks
from offbeat.control.step_time import StepTime

NUM_FACTORS = 12
MIN_ENDED = 24
"""Answers before lengths are believed: of fewer the tail is not seen."""
MAX_FIT_ERROR = 0.15
KEEP_FIT_ERROR = 0.3
"""Once 1 has been left: what a busy machine adds to all step times alike ranks no factor before another."""
MIN_GAIN = 0.03
"""Over a factor of 1: less is not worth older tokens."""
KEEP_GAIN = 0.015
"""Over a factor of 1, once it has been left: between the two nothing flutters."""
HYSTERESIS = 0.03
IDLE_LEAD = 0.01
"""Leads that never add up to a move: two factors as good as each other differ by this from version to version."""
EARLY = 2.0
"""What is asked of a lead is so many times higher for the first prediction, and less for each that it is averaged with:
the first is off by several per cent."""
TIE = 0.01
"""Of factors this close the smallest is taken: its tokens are fresher."""
MEMORY = 10
"""Versions over which predictions are averaged."""
MAX_NOTCHES = 6
"""Factors up in one version: a first prediction that is far too bold is found out halfway."""
BUSY = 0.8
"""Of the rate that no number of rows exceeds: the knee below which rows are refilled."""


class Fit(Protocol):
    """What is known of step times: an engine's, or a fleet's."""

    @property
    def model(self) -> StepTime | None: ...

    @property
    def error(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """For one version."""

    factor: float
    reason: str
    """One line, for people."""
    predicted_tokens_per_s: float | None = None
    """None where nothing could be predicted."""
    predicted_step_s: float | None = None
    predicted_off_policy_share: float | None = None
    min_rows: int = 0
    """Rows at the knee: whoever refills within a round does so below this only. 0 where it is not known."""


class OverProvision:
    """See the module. `decide` once a version, `outcome` once its round is over."""

    def __init__(self, setting: Setting, lengths: Lengths, fit: Fit, *, seed: int = 0):
        self.setting, self.lengths, self.fit = setting, lengths, fit
        self.factors = _factors(setting)
        self.last = Decision(1.0, "nothing was decided yet")
        self.corrections = Corrections(self.factors)
        self._seed, self._num_decided, self._num_averaged = seed, 0, 0
        self._gains = np.zeros(len(self.factors))
        """The log of the predicted rate over that of the first factor, averaged."""
        self._index, self._leads = 0, np.zeros(len(self.factors))
        """The factor in force, and what the leads of each other over it add up to."""
        self._has_moved = False
        """The first round at a new factor is neither the old one's nor the new one's: it corrects nothing."""
        self._unpredicted: list[tuple[float, float]] = []
        """Tokens and seconds of rounds at 1 before anything could be predicted: other factors are held against them."""

    @property
    def error(self) -> float:
        """How far predictions of tokens a second were off over recent rounds together, relatively."""
        return self.corrections.error

    def decide(self, survivors: Sequence[Survivor] = (), update_s: float | None = None) -> Decision:
        """The factor for the round that begins, and what is expected of it; `update_s` replaces the setting's."""
        before, self._num_decided = self._index, self._num_decided + 1
        why_not = self._why_not()
        if why_not is not None or (step_time := self.fit.model) is None:
            self._move(0)
            self._num_averaged = 0
            self.last = Decision(1.0, why_not or "step times are not known yet")
        else:
            setting = self.setting if update_s is None else replace(self.setting, update_s=update_s)
            law = self.lengths.law()
            seed = self._seed + 1000 * self._num_decided
            seen = outlooks(setting, step_time, law, self.factors, seed=seed, survivors=survivors)
            while self._unpredicted:
                self.corrections.note(0, *self._unpredicted.pop(), seen[0].tokens_per_s, seen[0].step_s)
            reason = self._choose(seen)
            min_rows = step_time.knee(BUSY, setting.prompt_tokens + law.mean_context)
            self.last = self._decision(seen[self._index], reason, min_rows)
        self._has_moved = self._index != before
        return self.last

    def outcome(self, tokens: float, seconds: float) -> None:
        """What the round gave: the tokens generated, and its seconds with those of the update after it."""
        rate, step_s = self.last.predicted_tokens_per_s, self.last.predicted_step_s
        if self._has_moved or tokens <= 0 or seconds <= 0:
            return
        if rate is None or step_s is None:
            self._unpredicted = [*self._unpredicted[-MEMORY:], (tokens, seconds)]
        else:
            self.corrections.note(self._index, tokens, seconds, rate, step_s)

    def _why_not(self) -> str | None:
        if len(self.factors) == 1:
            return f"a bound of {self.setting.bound} leaves no room for more"
        if self.lengths.num_ended < MIN_ENDED:
            return f"too few answers have ended: {self.lengths.num_ended:.0f} of {MIN_ENDED}"
        if self.fit.model is None:
            return "step times are not known yet"
        allowed = MAX_FIT_ERROR if self._index == 0 else KEEP_FIT_ERROR
        if self.fit.error > allowed:
            return f"step times are predicted badly: {self.fit.error:.0%} off, {allowed:.0%} allowed"
        return None

    def _choose(self, seen: Sequence[Outlook]) -> str:
        """Moves to the factor that the averaged predictions speak for, and says why."""
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
        return outlook.staleness_p95 <= self.setting.bound and (room is None or outlook.max_context_tokens <= room)

    def _move(self, index: int) -> None:
        self._index = min(index, self._index + MAX_NOTCHES)
        self._leads[:] = 0.0

    def _decision(self, outlook: Outlook, reason: str, min_rows: float) -> Decision:
        return Decision(
            factor=outlook.factor,
            reason=reason,
            predicted_tokens_per_s=outlook.tokens_per_s,
            predicted_step_s=outlook.step_s,
            predicted_off_policy_share=outlook.off_policy_share,
            min_rows=int(min(np.ceil(min_rows), 2**31)),
        )


def _factors(setting: Setting) -> list[float]:
    """A dozen from 1 to S + 1, denser at the low end, each a whole number of groups."""
    num_groups = np.geomspace(1, setting.bound + 1, NUM_FACTORS) * setting.groups_per_step
    return [float(num) / setting.groups_per_step for num in np.unique(np.rint(num_groups))]
