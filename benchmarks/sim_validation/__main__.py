"""Simulated runs against measured ones: `python -m benchmarks.sim_validation [--quick] [--only PART] [--keep FILE]`.

- paced: real coordinator, ledger, rewards, HTTP and worker loops, with paced engines, in real time. The simulation gets
  the case's settings, the answer lengths that its engines draw, and the times of a submission, a lease and a reward,
  which come from runs that are not validated. Compares samples/s, mean staleness, and how long each worker and the
  trainer were idle. A case counts where its repeated runs differ by at most 2 %.
- h200: the two runs recorded in `benchmarks/results/overlap-h200`. Constants come from the first half of
  each, and the second half is predicted.

`--keep FILE` appends measured runs to a file as lines, and does not repeat those in it. A quick run measures two cases
once, and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.sim_validation.cases import CALIBRATION, CASES, Case
from benchmarks.sim_validation.h200 import h200_bars, h200_rows
from benchmarks.sim_validation.measured import Measured, measure
from benchmarks.sim_validation.simulated import CallTimes, Predicted, predict

RATE_TARGET, STALENESS_TARGET, IDLE_TARGET, SPREAD_LIMIT = 0.05, 0.3, 0.10, 0.02
NUM_REPEATS, NUM_AT_ONCE = 2, 5
"""Runs of a case, and runs at a time: each waits for modelled times and needs a twentieth of a core."""
say = partial(report.say, "sim_validation")


@dataclass(frozen=True)
class Compared:
    """A case: its measured runs, and what was predicted."""

    case: Case
    runs: Sequence[Measured]
    predicted: Predicted

    @property
    def rate(self) -> float:
        return statistics.fmean(run.samples_per_s for run in self.runs)

    @property
    def spread(self) -> float:
        rates = [run.samples_per_s for run in self.runs]
        return (max(rates) - min(rates)) / self.rate

    @property
    def rate_error(self) -> float:
        return self.predicted.samples_per_s / self.rate - 1

    @property
    def staleness(self) -> float:
        return statistics.fmean(run.staleness for run in self.runs)

    @property
    def idle_error(self) -> float:
        """Largest difference of a share of idle time, over workers and the trainer."""
        measured = [statistics.fmean(shares) for shares in zip(*(run.idle for run in self.runs), strict=True)]
        measured.append(statistics.fmean(run.trainer_waits for run in self.runs))
        return max(
            abs(one - other)
            for one, other in zip(measured, [*self.predicted.idle, self.predicted.trainer_waits], strict=True)
        )


def measured_runs(cases: Sequence[Case], folder: Path, repeats: int, kept: Path | None) -> dict[str, list[Measured]]:
    """Returns the runs of each case, some at a time; those in the file `kept` are not repeated."""
    found: dict[str, list[Measured]] = {case.name: [] for case in cases}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            row = json.loads(line)
            if row["case"] in found:
                found[row["case"]].append(Measured(**{**row["run"], "idle": tuple(row["run"]["idle"])}))
    missing = [(case, repeat) for repeat in range(repeats) for case in cases if len(found[case.name]) <= repeat]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_AT_ONCE, mp_context=context) as pool:
        jobs = {pool.submit(measure, case, folder / f"{case.seed}-{repeat}"): case for case, repeat in missing}
        for job in as_completed(jobs):
            case, run = jobs[job], job.result()
            found[case.name].append(run)
            say(f"{case.name}: {run.samples_per_s:.2f} samples/s, staleness {run.staleness:.2f}")
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps({"case": case.name, "run": asdict(run)}) + "\n")
    return found


def call_times(runs: Sequence[Measured]) -> CallTimes:
    return CallTimes(
        *(statistics.median(getattr(run, name) for run in runs) for name in ("call_s", "lease_s", "reward_s"))
    )


def bars_of(compared: Sequence[Compared], quick: bool) -> dict[str, report.Bar | report.Unmeasured]:
    steady = [one for one in compared if one.spread <= SPREAD_LIMIT]
    bars: dict[str, report.Bar | report.Unmeasured] = {
        "mean staleness, largest error": report.at_most(
            STALENESS_TARGET,
            [max(abs(one.predicted.staleness - one.staleness) for one in compared)],
            quick=quick,
        ),
        "idle share, largest error": report.at_most(
            IDLE_TARGET, [max(one.idle_error for one in compared)], quick=quick
        ),
        "busy share of the cores, largest": report.at_most(
            0.5, [max(run.busy_cores for one in compared for run in one.runs) / 2], quick=quick
        ),
    }
    name = "samples/s, largest error where repeats differ by at most 2 %"
    bars[name] = (
        report.at_most(RATE_TARGET, [max(abs(one.rate_error) for one in steady)], quick=quick)
        if steady and not quick
        else report.Unmeasured(RATE_TARGET)
    )
    bars["cases whose repeats differ by at most 2 %"] = (
        report.Unmeasured(8) if quick else report.at_least(8, [len(steady)], quick=False)
    )
    return bars


def rows_of(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    return [
        (
            one.case.name,
            f"{one.rate:.2f} ±{one.spread / 2:.1%}",
            f"{one.predicted.samples_per_s:.2f}",
            f"{one.rate_error:+.1%}",
            f"{one.staleness:.2f} / {one.predicted.staleness:.2f}",
            f"{100 * one.idle_error:.0f} points",
        )
        for one in compared
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated runs against measured ones.")
    parser.add_argument("--quick", action="store_true", help="two cases, once: ends within a minute")
    parser.add_argument("--only", choices=("paced", "h200"), help="one part alone")
    parser.add_argument("--keep", type=Path, help="a file that keeps measured runs; those in it are not repeated")
    options = parser.parse_args()
    load, quick = Load(), options.quick
    rows: list[tuple[str, ...]] = []
    bars: dict[str, report.Bar | report.Unmeasured] = {}
    raw = {}
    if options.only != "h200":
        cases = CASES[:2] if quick else CASES
        with report.scratch("sim_validation") as folder:
            calibrated = measured_runs(CALIBRATION[: 1 if quick else 2], folder / "calibration", 1, options.keep)
            times = call_times([run for runs in calibrated.values() for run in runs])
            say(
                f"constants: {1e3 * times.call_s:.1f} ms a submission, {1e3 * times.lease_s:.1f} ms a lease, "
                f"{1e3 * times.reward_s:.1f} ms a reward"
            )
            found = measured_runs(cases, folder / "cases", 1 if quick else NUM_REPEATS, options.keep)
        compared = [Compared(case, found[case.name], predict(case, times)) for case in cases]
        rows += rows_of(compared)
        bars |= bars_of(compared, quick)
        raw["paced"] = [
            {"case": one.case.name, "runs": [asdict(run) for run in one.runs], "predicted": asdict(one.predicted)}
            for one in compared
        ]
        raw["constants"] = [asdict(times)]
    if options.only != "paced":
        rows += h200_rows()
        bars |= h200_bars(quick)
    report.show(
        "sim_validation",
        ("run", "measured", "simulated", "error", "staleness", "idle, at most off by"),
        rows,
        bars,
        quick=quick,
        **load.shares(),
        **raw,
    )


if __name__ == "__main__":
    main()
