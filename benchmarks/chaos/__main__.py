"""Faults in a supervised run under load: processes are killed, network lines are cut and calls are repeated.

    python -m benchmarks.chaos [--kills 200] [--seed N] [--partial] [--quick]

Coordinator, trainer and two workers belong to the supervisor; two more workers join over a bad line, which sends one
call in ten twice, up to two seconds late, and is cut now and then for longer than a lease. Workers have paced engines:
they start at once, and the load falls on the disk and the protocol. Weights travel as deltas: the two outside workers
fetch them from each other and over the line, the others from the coordinator. A kill counts if the process's parent saw
it die of the signal; a cut counts if it was longer than a lease.

At the end the run is stopped and its ledger is compared with the traffic on the line: everything acknowledged must be
there, and nothing may have been trained twice or too late. With --partial the run stops at every batch and carries on
unfinished answers, so partial trajectories are handed back and out again all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.chaos.audit import Audit
from benchmarks.chaos.scenario import BOUND, LEASE_S, SHARES, WORKERS, Chaos, chaos
from benchmarks.report import Bar, show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help="how many (200; with --quick 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partial", action="store_true", help="stop at every batch and carry on what is unfinished")
    parser.add_argument("--quick", action="store_true", help="a few kills: shows that it works, decides little")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the run there")
    arguments = parser.parse_args()
    num_kills = arguments.kills or (8 if arguments.quick else 200)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        chosen = chaos(folder, num_kills, arguments.seed, partial=arguments.partial)
        made, found, seconds = asyncio.run(chosen)
    show_report(made, found, seconds, num_kills, quick=arguments.quick)
    return 0


def show_report(made: Chaos, found: Audit, seconds: float, num_kills: int, *, quick: bool) -> None:
    roles = Counter({"worker": sum(made.witnessed[name] for name in WORKERS)})
    roles.update({name: made.witnessed[name] for name in SHARES})
    num_witnessed = sum(roles.values())
    seen = made.proxy.seen
    figures: dict[str, Any] = {
        **{f"kills of {role}": count for role, count in sorted(roles.items())},
        f"cuts longer than a lease ({LEASE_S:g} s)": made.num_cuts,
        "suspensions longer than a lease": made.num_freezes,
        "calls sent twice": sum(seen.copies.values()),
        "submissions replayed at the end": made.num_replays,
        "acknowledged over the line": len(seen.acknowledged),
        "beginnings handed back": found.num_partials,
        "refused as fenced": seen.statuses[410],
        "steps trained": found.num_trained,
        "seconds": round(seconds, 1),
    }
    bars = {
        "lost": _none(len(found.lost) + len(found.violations), quick),
        "doubled": _none(len(found.doubled), quick),
        "over_bound": _none(max(0, found.max_staleness - BOUND), quick),
        "witnessed": Bar(num_witnessed, num_kills, None if quick else num_witnessed >= num_kills, (num_witnessed,) * 2),
    }
    table = [[name, str(value)] for name, value in figures.items()]
    table += [["wrong", line] for line in (*found.lost, *found.doubled, *found.violations)[:20]]
    show(
        "chaos", ["what", "count"], table, bars, figures=figures, statuses=dict(seen.statuses), copies=dict(seen.copies)
    )


def _none(count: int, quick: bool) -> Bar:
    """Returns a bar for a count that must be 0. A quick run can only show that something is lost, not that nothing
    is."""
    return Bar(count, 0, None if quick and count == 0 else count == 0, (count, count))


if __name__ == "__main__":
    sys.exit(main())
