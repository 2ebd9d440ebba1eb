"""Overlapped against alternating schedules: `python -m benchmarks.async_vs_sequential [--quick] [--only PART]`.

- paced (`paced.py`): a trainer and two workers at a modelled pace. One worker is three times as fast as the other, and
  the lengths of answers differ much. Compares the samples trained per second, and the idle time of the fast worker,
  with `overlap`, where workers never stop, and with `alternate`, where generation and training take turns. A third row
  is `alternate` with half of the tasks for each worker.
- learning (`learning.py`): real engines on a hard level of arithmetic. Compares the samples that `overlap` and
  `alternate` need for the same held-out reward.

A quick run trains for a few steps and decides nothing about learning.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from benchmarks import report
from benchmarks.async_vs_sequential.learning import Size, learn_all, learning_bars, learning_raw, learning_rows
from benchmarks.async_vs_sequential.paced import paced_bars, paced_rows, paces_of
from benchmarks.common.load import Load

FULL, QUICK = Size(seeds=5, steps=40, save_every=4, prompts=2000), Size(seeds=1, steps=4, save_every=2, prompts=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlapped against alternating schedules.")
    parser.add_argument("--quick", action="store_true", help="a few steps of each: ends within a minute")
    parser.add_argument("--only", choices=("paced", "learning"), help="one part alone")
    options = parser.parse_args()
    load, quick = Load(), options.quick
    rows: list[tuple[str, str, str]] = []
    bars: dict[str, report.Bar] = {}
    raw: dict[str, Any] = {}
    with report.scratch("async_vs_sequential") as folder:
        if options.only != "learning":
            paces = paces_of(folder, quick)
            rows += paced_rows(paces)
            bars |= paced_bars(paces, quick)
            raw["paced"] = {plan.value: [asdict(pace) for pace in values] for plan, values in paces.items()}
        if options.only != "paced":
            learned_by = learn_all(folder, QUICK if quick else FULL)
            rows += learning_rows(learned_by)
            bars |= learning_bars(learned_by, quick)
            raw["learning"] = learning_raw(learned_by)
    report.show(
        "async_vs_sequential", ("schedule", "median", "beside"), rows, bars, quick=quick, **load.shares(), **raw
    )


if __name__ == "__main__":
    main()
