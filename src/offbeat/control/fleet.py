"""How long steps take on all engines together, learnt from each one's own.

Duty: the over-provision controller sees one engine. Workers pull tasks as they have room, so that rows spread about
evenly over engines; all of them step at the same time, each with its part of the rows.

Guarantees: an engine that is not known yet, or has left, is not counted; with one engine its own figures come out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from offbeat.control.step_time import StepTime, StepTimeFit, Timing


class FleetFit:
    """The step times of several workers, by name; `model` and `error` as those of a `StepTimeFit`."""

    def __init__(self) -> None:
        self._fits: dict[str, StepTimeFit] = {}

    def observe(self, worker: str, timings: Sequence[Timing]) -> None:
        fit = self._fits.setdefault(worker, StepTimeFit())
        for timing in timings:
            fit.observe(timing)

    def left(self, worker: str) -> None:
        self._fits.pop(worker, None)

    @property
    def model(self) -> StepTime | None:
        """Of all engines seen as one; None while none is known."""
        models = [fit.model for fit in self._fits.values()]
        known = [model for model in models if model is not None]
        if not known:
            return None
        mean = StepTime(
            fmean(model.base_s for model in known),
            _at_once([model.per_row_s for model in known]),
            _at_once([model.per_token_s for model in known]),
            _at_once([model.prefill_s for model in known]),
        )
        return mean.spread(len(known))

    @property
    def error(self) -> float:
        """The median engine's."""
        errors = [fit.error for fit in self._fits.values() if fit.model is not None]
        return median(errors) if errors else math.inf


def _at_once(costs: Sequence[float]) -> float:
    """What a row costs on engines that share rows by their speed, times their number: the harmonic mean."""
    return len(costs) / sum(1 / cost for cost in costs) if all(cost > 0 for cost in costs) else 0.0
