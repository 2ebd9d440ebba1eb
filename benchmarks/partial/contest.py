"""Results of the contest and its bars: all entries on all laws in engine time, a few of them by the wall clock.

*At equal share* compares ours with the best rate that `april` reaches with no more off-policy tokens. This is the curve
of `april` over its factor, starting from `sync`, interpolated. It never falls, because nobody has to choose a larger
factor that is slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks import report
from benchmarks.partial.accounts import Figures
from benchmarks.partial.entries import OURS, RELEASE, STRICT, SYNC, Entry
from benchmarks.partial.laws import LIGHT, LOG_NORMAL, Law

OVER_SYNC = 1.4
OVER_APRIL = {STRICT: 1.10, RELEASE: 1.25}
ENGINE, WALL = "engine time", "wall clock"
LIGHT_OVER_SYNC = {ENGINE: 0.99, WALL: 0.95}
OVER_BEST_FIXED = {ENGINE: 0.97, WALL: 0.90}


@dataclass(frozen=True)
class Run:
    """One entry on one law from one seed."""

    law: Law
    entry: Entry
    seed: int


Results = Mapping[Run, Figures]


class Contest:
    """Results by one clock, and comparisons between them."""

    def __init__(self, clock: str, results: Results):
        self.clock, self.results = clock, results
        self.laws = list(dict.fromkeys(run.law for run in results))
        self.entries = list(dict.fromkeys(run.entry for run in results))
        self.seeds = sorted({run.seed for run in results})

    def mean(self, law: Law, entry: Entry, figure: str, seeds: Sequence[int] | None = None) -> float:
        seeds = self.seeds if seeds is None else seeds
        return statistics.mean(getattr(self.results[Run(law, entry, seed)], figure) for seed in seeds)

    def took_part(self, law: Law, entry: Entry) -> bool:
        return Run(law, entry, self.seeds[0]) in self.results

    def over_sync(self, entry: Entry, law: Law, seeds: Sequence[int] | None = None) -> float:
        return self.mean(law, entry, "rate", seeds) / self.mean(law, SYNC, "rate", seeds)

    def over_april(self, entry: Entry, law: Law, seeds: Sequence[int] | None = None) -> float:
        """Our rate over that of `april` at equal share, as the module defines it."""
        rivals = [one for one in self.entries if one.curve == "april" and self.took_part(law, one)]
        points = [(self.mean(law, one, "off_policy_share", seeds), self.over_sync(one, law, seeds)) for one in rivals]
        share = self.mean(law, entry, "off_policy_share", seeds)
        return self.over_sync(entry, law, seeds) / best_at(share, [(0.0, 1.0), *points])

    def best_fixed(self, curve: str, law: Law) -> Entry | None:
        """Fixed factor with the highest mean rate over all seeds; None if no fixed factor took part."""
        fixed = [one for one in self.entries if one.curve == curve and one.factor and self.took_part(law, one)]
        return max(fixed, key=lambda one: self.mean(law, one, "rate"), default=None)

    def over_best_fixed(self, curve: str, law: Law, seeds: Sequence[int] | None = None) -> float:
        best = self.best_fixed(curve, law)
        assert best is not None
        return self.mean(law, Entry(curve), "rate", seeds) / self.mean(law, best, "rate", seeds)

    def bars(self) -> dict[str, report.Bar]:
        log_normal = [law for law in self.laws if law in LOG_NORMAL]
        light = [law for law in self.laws if law in LIGHT]
        bars: dict[str, report.Bar] = {}
        for curve, over_april in OVER_APRIL.items():
            ours = Entry(curve)
            over_sync, at_equal_share = partial(self.over_sync, ours), partial(self.over_april, ours)
            judged = [law for law in self.laws if self.best_fixed(curve, law)]
            bars |= {
                f"{curve} over sync": self._worst(log_normal, over_sync, OVER_SYNC),
                f"{curve} over april at equal off-policy share": self._worst(log_normal, at_equal_share, over_april),
                f"{curve} over sync, light tail": self._worst(light, over_sync, LIGHT_OVER_SYNC[self.clock]),
                f"{curve}, factor chosen online over the best fixed": self._worst(
                    judged, partial(self.over_best_fixed, curve), OVER_BEST_FIXED[self.clock]
                ),
            }
        return {f"{self.clock}: {name}": bar for name, bar in bars.items()}

    def _worst(self, laws: Sequence[Law], ratio: Callable[[Law, Sequence[int]], float], target: float) -> report.Bar:
        """The law with the smallest ratio decides; the spread is that of its seeds.

        In engine time it is a ratio of means; by the wall clock the median of seeds, since a run may meet a neighbour.
        """
        each = {law: [ratio(law, [seed]) for seed in self.seeds] for law in laws}
        of_law = {law: statistics.median(each[law]) if self.clock == WALL else ratio(law, self.seeds) for law in laws}
        worst = min(laws, key=lambda law: of_law[law])
        value = round(of_law[worst], 3)
        seen = [round(one, 3) for one in each[worst]]
        return report.Bar(value, target, of_law[worst] >= target, (min(*seen, value), max(*seen, value)))

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table's rows: a heading for each law, and a line for each entry."""
        rows: list[tuple[str, ...]] = []
        for law in self.laws:
            rows.append((f"{self.clock}, {law.name}", *[""] * (len(HEADER) - 1)))
            rows += [self._row(law, entry) for entry in self.entries if self.took_part(law, entry)]
        return rows

    def _row(self, law: Law, entry: Entry) -> tuple[str, ...]:
        return (
            f"  {entry.name}",
            f"{self.over_sync(entry, law):.2f}",
            f"{self.over_april(entry, law):.2f}" if entry.curve in OURS else "",
            f"{self.mean(law, entry, 'off_policy_share'):.0%}",
            "/".join(f"{self.mean(law, entry, f'staleness_{which}'):.2g}" for which in ("p50", "p95", "max")),
            f"{self.mean(law, entry, 'reprefill_share'):.0%}",
            self._waste(law, entry),
        )

    def _waste(self, law: Law, entry: Entry) -> str:
        """The share of all generated tokens, and what became of them."""
        share = self.mean(law, entry, "waste_share")
        causes = {cause for seed in self.seeds for cause in self.results[Run(law, entry, seed)].wasted}
        return f"{share:.0%} {', '.join(sorted(causes))}" if share else "0%"


HEADER = ("", "x sync", "x april", "stale", "age", "refill", "waste")
"""Tokens a second over `sync`, and over `april` at equal share; the share of tokens that are off-policy; the staleness
that 50 %, 95 % and all of them do not pass; the share of time spent on prefilling again; tokens that nobody will train
on over those generated, and why."""


def best_at(share: float, points: Sequence[tuple[float, float]]) -> float:
    """Returns the highest rate that a curve of (share, rate) reaches up to a share."""
    shares, rates = zip(*sorted(points), strict=True)
    reached = [rate for at, rate in points if at <= share]
    return max(float(np.interp(share, shares, rates)), *reached) if reached else float(rates[0])
