"""Chooses the over-provision factor of a run in rounds: groups in flight divided by groups that a step trains.

The factor is at first S + 1, the largest that the bound S (`max_staleness`) allows. With every distribution of answer
lengths that was measured, no other factor gave more tokens per second by more than noise (see
docs/partial-rollouts.md). But where the answers are about equally long, or an engine prefills interrupted answers
slowly, S + 1 may be no faster than 1, and would only make tokens older. So now and then `OverProvision` measures a few
rounds with the other of these two factors. It then uses S + 1 if this is faster than 1 by at least `MIN_GAIN`, else 1.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MIN_GAIN = 0.03
"""Smallest relative gain in tokens per second over factor 1 for which training on older tokens is worth it."""
NUM_TRIED, NUM_KEPT = 5, 16
"""Number of rounds in which another factor is tried, and largest number of latest rounds over which the speed of the
factor in use is averaged."""
FIRST_PATIENCE = 32
"""Number of measured rounds before the other factor is tried. It quadruples with every trial: a trial costs time, and
answer lengths change slowly."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The over-provision factor from now on, and the reason in one line."""

    factor: float
    reason: str


class OverProvision:
    """Chooses `factor`, the over-provision factor for the next round. Call `outcome` after every round. Call
    `fleet_changed` when the number of the engines' slots has changed: rates before and after are not compared.

    After a change of the factor, rounds are not measured until all groups begun with the previous factor can have been
    trained.
    """

    def __init__(self, max_staleness: int):
        self.largest = max_staleness + 1.0
        self.factor = self.largest
        self._rounds: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        """Tokens and seconds of measured rounds with the present factor."""
        self._num_measured, self._patience = 0, FIRST_PATIENCE
        self._num_unmeasured = max_staleness + 1
        """Number of coming rounds that are not measured."""
        self._other_rate: float | None = None
        """During a trial, tokens per second with the factor that was in use before it; None: there is no trial."""

    def fleet_changed(self) -> None:
        self._other_rate = None
        self._rounds.clear()

    def outcome(self, tokens: float, seconds: float) -> Decision | None:
        """Records a finished round. `tokens` is the number of tokens generated in the round, or that of the answers
        that ended in it; on average the two are equal. `seconds` is the time of the round and of the update after it.
        Returns a decision when a trial begins or ends."""
        if self.largest == 1.0:
            return None
        if self._num_unmeasured:
            self._num_unmeasured -= 1
            return None
        self._rounds.append((tokens, seconds))
        self._num_measured += 1
        if len(self._rounds) < NUM_TRIED:
            return None
        rate = sum(tokens for tokens, _ in self._rounds) / max(sum(seconds for _, seconds in self._rounds), 1e-9)
        if self._other_rate is not None:
            return self._end_trial(rate, self._other_rate)
        if self._num_measured < self._patience:
            return None
        self._patience *= 4
        return self._change(rate, f"factor {self._other():g} is tried for {NUM_TRIED} rounds")

    def _end_trial(self, rate: float, other_rate: float) -> Decision | None:
        with_one, with_largest = (rate, other_rate) if self.factor == 1.0 else (other_rate, rate)
        is_worth_it = with_largest >= (1 + MIN_GAIN) * with_one
        reason = f"{with_one:.0f} tokens/s with factor 1, {with_largest:.0f} with {self.largest:g}"
        if (self.factor == self.largest) != is_worth_it:
            return self._change(None, reason)
        self._other_rate, self._num_measured = None, 0
        return Decision(self.factor, reason)

    def _change(self, rate: float | None, reason: str) -> Decision:
        self.factor, self._other_rate = self._other(), rate
        self._rounds.clear()
        self._num_measured, self._num_unmeasured = 0, round(self.largest)
        return Decision(self.factor, reason)

    def _other(self) -> float:
        return 1.0 if self.factor == self.largest else self.largest
