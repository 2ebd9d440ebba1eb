"""Two hundred workers at one coordinator, over HTTP on loopback: `python -m benchmarks.swarm [--quick]`.

The coordinator is a process bound to one core. The workers are tasks of this process, on another core; they are real
except for their paced engines. Measures

- submissions per second while workers offer more than the server can take, over those of the same server (application,
  access checks, parsing) with a stand-in behind it that acknowledges at once and stores nothing. Both servers run at
  the same time and are loaded in turn. Rates are also computed per second of the server's CPU time. If the workers'
  core is the bottleneck, the ratio of plain rates is too favourable, so the bar uses the lower of the two ratios;
- the latency of an acknowledgement, at that load and at a lighter one;
- growth of the coordinator's memory over five minutes at the lighter load.

A quick run has one short round, in which connections are still being opened, and decides nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.swarm.load import FULL, NUM_WORKERS, QUICK, Loaded, MemoryLog, measure
from benchmarks.swarm.workers import NUM_SLOTS

RATE_TARGET, GROWTH_TARGET = 0.5, 0.05


def growth(memory: MemoryLog) -> float:
    """Returns the relative growth of memory in five minutes, by a linear fit."""
    seconds, megabytes = zip(*memory, strict=True)
    return float(300.0 * np.polyfit(seconds, megabytes, 1)[0] / statistics.fmean(megabytes))


def bars_of(loads: dict[str, list[Loaded]], memory: MemoryLog, quick: bool) -> dict[str, report.Bar]:
    pairs = list(zip(loads["ledger"], loads["stand-in"], strict=True))
    ratios = [min(ours.rate / other.rate, ours.per_cpu_s / other.per_cpu_s) for ours, other in pairs]
    bars = {
        "submissions/s over a server without a ledger": report.at_least(RATE_TARGET, ratios, quick=quick),
        "memory growth in five minutes": report.at_most(GROWTH_TARGET, [growth(memory)], quick=quick),
    }
    return {name: replace(bar, holds=None) if quick else bar for name, bar in bars.items()}


def rows_of(loads: dict[str, list[Loaded]]) -> list[tuple[str, ...]]:
    def row(name: str, values: Sequence[Loaded]) -> tuple[str, ...]:
        def median(figure: str) -> float:
            return statistics.median(getattr(value, figure) for value in values)

        return (
            name,
            f"{median('rate'):,.0f}",
            f"{median('per_cpu_s'):,.0f}",
            f"{median('p50_ms'):,.0f}",
            f"{median('p99_ms'):,.0f}",
            f"{median('server_share'):.0%}",
            f"{median('workers_share'):.0%}",
        )

    names = {"ledger": "ledger, overloaded", "stand-in": "stand-in, overloaded", "light": "ledger, light load"}
    return [row(names[name], values) for name, values in loads.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Two hundred workers at one coordinator.")
    parser.add_argument("--quick", action="store_true", help="one short round: ends within a minute")
    options = parser.parse_args()
    lengths, load = QUICK if options.quick else FULL, Load()
    with report.scratch("swarm") as folder:
        loads, memory, held = measure(folder, lengths)
    report.show(
        "swarm",
        ("server", "submissions/s", "per CPU s", "p50 ms", "p99 ms", "its core", "workers' core"),
        rows_of(loads),
        bars_of(loads, memory, options.quick),
        quick=options.quick,
        num_workers=NUM_WORKERS,
        num_slots=NUM_SLOTS,
        num_accepted=held["accepted"],
        **load.shares(),
        loads={name: [vars(value) for value in values] for name, values in loads.items()},
        memory_megabytes=memory,
    )


if __name__ == "__main__":
    main()
