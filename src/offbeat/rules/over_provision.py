"""The over-provision factor: groups in flight (drawn, but not yet trained or dropped) divided by groups that a step
trains.

If the factor is configured as "auto", it may change at every published version. If generation overlaps with training,
`Overlapped` chooses it by the trainer's idle time (`Depth`). If generation stops once a batch is complete (rounds),
`InRounds` chooses it with `OverProvision`. The factor is not stored, so a restart chooses it afresh.

In rounds, the factor is at first S + 1, the largest that the bound S (`max_staleness`) allows. With every distribution
of answer lengths that was measured, no other factor gave more tokens per second by more than noise (see
docs/partial-rollouts.md). But where the answers are about equally long, or an engine prefills interrupted answers
slowly, S + 1 may be no faster than 1, and would only make tokens older. So now and then `OverProvision` measures a few
rounds with the other of these two factors. It then uses S + 1 if this is faster than 1 by at least `MIN_GAIN`, else 1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from offbeat.rules.depth import Depth

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


class Provisioning:
    """Holds a constant over-provision factor (groups in flight divided by groups that a step trains). Subclasses change
    the factor when one of the methods below is called."""

    def __init__(self, factor: float):
        self._factor = factor

    def factor(self) -> float:
        return self._factor

    def handed_out(self, *, requires_version: bool) -> None:
        """Called when a worker has leased tasks; `requires_version` says whether any of them requires a version."""

    def ended(self, num_tokens: int) -> None:
        """Called when a whole trajectory of `num_tokens` tokens has been stored."""

    def began(self, num_slots: int) -> None:
        """Called when a version is published: the work on the batch that is trained from this version begins. All
        workers together can generate `num_slots` answers at once."""

    def trained(self, still_s: float, step_s: float) -> None:
        """Called after a step that took `step_s` seconds, including `still_s` seconds in which the trainer waited for
        its batch."""

    def figures(self) -> dict[str, float]:
        """Returns figures to add to the metrics row of a training step."""
        return {"over_provision": self._factor}


class Overlapped(Provisioning):
    """Chooses the over-provision factor if generation overlaps with training: 1 plus the number of steps by which
    workers should be ahead of the trainer (`Depth`)."""

    def __init__(self, max_staleness: int):
        self._depth = Depth(max_staleness)
        super().__init__(1.0 + self._depth.steps)

    def began(self, num_slots: int) -> None:
        self._factor = 1.0 + self._depth.steps

    def trained(self, still_s: float, step_s: float) -> None:
        self._depth.trained(still_s, step_s)


class InRounds(Provisioning):
    """Chooses the over-provision factor with `OverProvision`, for runs in which generation stops once a batch is
    complete. Calls `on_choice` with every decision of `OverProvision`."""

    def __init__(
        self,
        max_staleness: int,
        on_choice: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._choice = OverProvision(max_staleness)
        super().__init__(self._choice.factor)
        self._on_choice, self._clock = on_choice, clock
        self._num_tokens, self._is_mixed = 0, False
        """Number of tokens of the answers that ended in this round, and whether the round also has evaluation tasks,
        in which case its speed is not measured."""
        self._began_s: float | None = None
        self._num_slots = 0
        self._tokens_per_s: float | None = None

    def handed_out(self, *, requires_version: bool) -> None:
        self._is_mixed |= requires_version

    def ended(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def began(self, num_slots: int) -> None:
        now_s = self._clock()
        if self._began_s is not None and not self._is_mixed and now_s > self._began_s:
            self._end_round(now_s - self._began_s)
        if num_slots != self._num_slots:
            self._choice.fleet_changed()
        self._began_s, self._num_slots = now_s, num_slots
        self._num_tokens, self._is_mixed = 0, False

    def _end_round(self, seconds: float) -> None:
        self._tokens_per_s = self._num_tokens / seconds
        if (decision := self._choice.outcome(self._num_tokens, seconds)) is not None:
            self._factor = decision.factor
            self._on_choice(decision)

    def figures(self) -> dict[str, float]:
        measured = {} if self._tokens_per_s is None else {"generated_tokens_per_second": self._tokens_per_s}
        return {**super().figures(), **measured}


def provisioning_of(
    configured: float | Literal["auto"],
    max_staleness: int,
    on_choice: Callable[[Decision], None],
    *,
    overlaps: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Provisioning:
    """Returns the object that holds or chooses a run's over-provision factor. A number in `configured` is the factor.
    With "auto", the factor follows the trainer's idle time if generation overlaps with training, otherwise the measured
    speed of rounds."""
    if configured != "auto":
        return Provisioning(configured)
    return Overlapped(max_staleness) if overlaps else InRounds(max_staleness, on_choice, clock)
