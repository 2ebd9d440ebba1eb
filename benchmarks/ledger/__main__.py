"""The ledger against SQLite alone: the cost of its checks, compared with bare rows of the same bytes.

All files are on the repository's disk, with the same settings (WAL, `synchronous=FULL`). Compared calls take turns one
by one, so that a slow moment of the disk affects both. Measures

- submissions: `Ledger.submit` (fences, prompts, versions, digests, segments, sums) over bare inserts of the same bodies
  into one table, at 1 and at 16 rows per commit;
- a claim of 512 trajectories out of 100,000 waiting ones, over a bare SELECT and UPDATE of as many rows. The claim also
  chooses by age, checks the bound and returns trajectories ready to train;
- growth: the cost of a submission, a lease and a claim in a ledger with a million trained trajectories, over one with
  ten thousand.

A quick run has fewer rows waiting and trained, so its claims and growth decide nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.ledger.measure import TRAJECTORIES_PER_CLAIM, bars_of, measure


def rows_of(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    def row(name: str, pairs: Sequence[tuple[float, float]], form: str, scale: float = 1.0) -> tuple[str, str, str]:
        ours, other = (statistics.median(values) * scale for values in zip(*pairs, strict=True))
        return name, format(ours, form), format(other, form)

    rows = [
        row(f"submissions/s, {num_rows} a commit", pairs, ",.0f") for num_rows, pairs in figures["submissions"].items()
    ]
    rows.append(row(f"claim of {TRAJECTORIES_PER_CLAIM}, ms", figures["claims"], ".1f", 1e3))
    for operation, pairs in figures["growth"].items():
        swapped = [(large_s, small_s) for small_s, large_s in pairs]
        rows.append(row(f"{operation}, ms: large and small ledger", swapped, ".2f", 1e3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The ledger against SQLite alone.")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: ends within a minute")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    num_rounds, load = 3 if options.quick else options.rounds, Load()
    with report.scratch("ledger") as folder:
        figures = measure(folder, options.quick, num_rounds)
    report.show(
        "ledger",
        ("median of rounds", "ledger", "bare or small"),
        rows_of(figures),
        bars_of(figures, options.quick),
        quick=options.quick,
        **load.shares(),
        **figures,
    )


if __name__ == "__main__":
    main()
