"""What a worker's engine did since it was last asked: differences of its figures, as `control.step_time` takes them.

Duty: turn sums that only grow into intervals. An interval in which nothing was stepped tells nothing and is left to the
next one; an engine that does not know its steps, their rows and what these read has no timings. Where it does not know
what it prefilled, the time that this took counts as that of steps.
"""

from __future__ import annotations

from offbeat.control.step_time import Timing
from offbeat.rollout.engine import Engine, EngineFigures


class Timings:
    """Intervals of one engine after the other."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._before = EngineFigures()

    def follow(self, engine: Engine) -> None:
        """From now on this engine generates; what it did before is left out."""
        self._engine, self._before = engine, engine.figures

    def take(self) -> Timing | None:
        """What was done since the last call that told something."""
        if self._engine is None:
            return None
        now = self._engine.figures
        timing = timing_between(self._before, now)
        if timing is not None:
            self._before = now
        return timing


def timing_between(before: EngineFigures, after: EngineFigures) -> Timing | None:
    """None where no step was taken between, or where the engine does not know what it did."""
    num_steps = _difference(before.num_steps, after.num_steps)
    num_rows = _difference(before.num_rows, after.num_rows)
    num_context_tokens = _difference(before.num_context_tokens, after.num_context_tokens)
    num_prefilled_tokens = _difference(before.num_prefilled_tokens, after.num_prefilled_tokens) or 0
    if num_steps is None or num_rows is None or num_context_tokens is None:
        return None
    if before.busy_seconds is None or after.busy_seconds is None or num_steps < 1:
        return None
    seconds = after.busy_seconds - before.busy_seconds
    return Timing(num_steps, num_rows, num_context_tokens, num_prefilled_tokens, seconds)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
