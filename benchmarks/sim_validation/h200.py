"""The runs recorded on an H200, simulated from their own records.

Engine and trainer share one GPU, so the speed of one depends on what the other does, and no constants of one run hold
for the other. Constants therefore come from the first half of a run's counted steps, and the second half is predicted.
The lengths follow a log-normal law with the recorded mean and share of cut answers.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from offbeat.planner.inputs.workload import log_normal
from offbeat.simulator import report as simulated
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import Lengths, LogNormal, constant
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import CoordinatorModel, Scenario, Simulation, TrainerModel

FOLDER = report.REPOSITORY / "benchmarks" / "results" / "overlap-h200"
NUM_SKIPPED, MAX_TOKENS, PROMPT_TOKENS, SLOTS = 4, 512, 60, 256
GROUPS, GROUP_SIZE = 32, 8
TARGET = 0.15
COMPILED = 3.0
"""A step that trains this many times as long as usual has compiled something; one recorded step did."""


@dataclass(frozen=True)
class Halves:
    """A recorded run: rows of its counted steps, in two halves."""

    name: str
    first: list[dict[str, Any]]
    second: list[dict[str, Any]]

    @property
    def rate(self) -> float:
        """Trained tokens per second of the second half, without steps that compiled a new size of micro-batch."""
        usual_s = statistics.median(row["time_train_s"] for row in self.second)
        rows = [row for row in self.second if row["time_train_s"] < COMPILED * usual_s]
        return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)

    @property
    def staleness(self) -> float:
        return statistics.fmean(row["staleness"] for row in self.second)


def recorded(name: str) -> Halves:
    rows = [json.loads(line) for line in (FOLDER / f"{name}-metrics.jsonl").read_text().splitlines()][NUM_SKIPPED:]
    return Halves(name, rows[: len(rows) // 2], rows[len(rows) // 2 :])


def law_of(mean: float, cut_share: float) -> LogNormal:
    """Returns the log-normal law whose answers, cut at the limit, have this mean and this share of cut answers."""
    best = (float("inf"), LogNormal(1.0, 1.0, MAX_TOKENS))
    for tenths in range(2, 40):
        sigma = tenths / 10
        median = MAX_TOKENS / 2.718281828 ** (sigma * statistics.NormalDist().inv_cdf(1 - cut_share))
        error = abs(log_normal(median, sigma, MAX_TOKENS).mean - mean)
        best = min(best, (error, LogNormal(median, sigma, MAX_TOKENS)), key=lambda one: one[0])
    return best[1]


def predict(run: Halves) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in run.first)

    overlap = run.name == "overlap"
    if overlap:  # all slots are always in use
        step_s = SLOTS * statistics.median(row["seconds"] / row["tokens"] for row in run.first)
    else:  # in each step, some answers have the full length
        step_s = median("time_generate_s") / MAX_TOKENS
    per_token_s = statistics.median(row["time_train_s"] / row["num_row_tokens"] for row in run.first)
    scenario = Scenario(
        (WorkerClass("vllm", 1, SLOTS, EngineSpeed(linear(step_s, 0.0, SLOTS))),),
        LedgerSettings(GROUPS, 4 if overlap else 0, 60),
        TrainerModel(token_s=per_token_s, publish_s=median("time_publish_s")),
        CoordinatorModel(reward_delay_s=median("time_reward_s")),
        overlap=overlap,
        over_provision=statistics.median(row["over_provision"] for row in run.first),
        num_warmup=20,
        num_measured=50,
    )
    law = law_of(median("length"), median("cut_share"))
    simulation = Simulation(
        scenario, Lengths(law, GROUP_SIZE, prompt=constant(PROMPT_TOKENS), longest=MAX_TOKENS, shared=0.5)
    )
    simulation.run()
    return simulated.figures(simulation)


def h200_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in ("alternate", "overlap"):
        run = recorded(name)
        found = predict(run)
        rate = found["trained_tokens_per_s"]
        rows.append(
            (
                f"H200, {name}, tokens/s",
                f"{run.rate:,.0f}",
                f"{rate:,.0f}",
                f"{rate / run.rate - 1:+.1%}",
                f"{run.staleness:.2f} / {found['staleness']:.2f}",
                "",
            )
        )
    return rows


def h200_bars(quick: bool) -> dict[str, report.Bar | report.Unmeasured]:
    errors = []
    for name in ("alternate", "overlap"):
        run = recorded(name)
        errors.append(abs(predict(run)["trained_tokens_per_s"] / run.rate - 1))
    return {"H200, trained tokens/s, largest error": report.at_most(TARGET, [max(errors)], quick=quick)}
