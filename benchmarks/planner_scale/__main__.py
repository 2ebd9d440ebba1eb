"""Planning time for 64 to 65,536 accelerators of 8 classes: `python -m benchmarks.planner_scale [--quick]`.

One process on one core computes the columns for an inventory and a workload by the cost model, and then the fastest
plan for half the price of the whole inventory, with a proof to a gap of 0.01 %. Both are timed together; checking the
plan without a solver is not timed. Cards and prices are from the catalogue; links, lengths and models are random.

Bars use the worst seed, in CPU seconds, so that other load on the machine does not matter. Wall-clock seconds are shown
as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks import report
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.planner.inputs.model_shapes import known_model
from offbeat.planner.inputs.workload import KvPolicy, Workload, log_normal
from offbeat.planner.problem import PlanningProblem
from offbeat.planner.solve.check import check, unproven
from offbeat.planner.solve.search import GAP, cheapest, fastest

SIZES = (64, 256, 1_024, 4_096, 16_384, 65_536)
CARDS = ("a100-40gb", "a100-80gb", "l40s", "h20", "h100-pcie", "h100-sxm", "h200", "mi300x")
PER_NODE = 8
GROUP_SIZE = 16
NUM_SEEDS = 5
TARGETS_S = {1_024: 2.0, 16_384: 10.0}
BUDGET_SHARE = 0.5
SLACK = 0.7
"""Throughput required of the cheapest plan, as a share of the fastest plan's."""
GB = 1e9

Made = TypeVar("Made")


def inventory(num_accelerators: int, draw: random.Random) -> Inventory:
    """Makes an inventory with equally many nodes of each class; 12 to 50 GB/s between nodes, less between classes."""
    num_nodes = max(1, num_accelerators // PER_NODE // len(CARDS))
    classes = {
        name: MachineClass(name, card, PER_NODE, num_nodes, card.price_per_h or 1.85)
        for name, card in ((name, hardware.accelerator(name)) for name in CARDS)
    }
    links = {frozenset([name]): Link(draw.uniform(12, 50) * GB) for name in classes}
    for one, other in itertools.combinations(classes, 2):
        slower = min(links[frozenset([name])].bytes_per_s for name in (one, other))
        links[frozenset([one, other])] = Link(slower * draw.uniform(0.2, 0.8))
    return Inventory(classes, links)


def workload(num_accelerators: int, draw: random.Random) -> Workload:
    """Makes a workload with a group of answers for every accelerator, so that all accelerators could be used."""
    return Workload(
        known_model(draw.choice(["qwen2.5-1.5b", "qwen2.5-7b", "qwen3-8b", "qwen2.5-14b"])),
        groups_per_step=num_accelerators,
        group_size=GROUP_SIZE,
        prompt=log_normal(300, 0.5, 1024),
        answer=log_normal(draw.uniform(1500, 5000), draw.uniform(0.5, 1.0), 27_648),
        bound=draw.choice([2, 4, 8]),
        updates_per_step=4,
        kv=draw.choice([KvPolicy.STALE, KvPolicy.REFILL]),
    )


def whole_price(problem: PlanningProblem) -> float:
    return sum(offer.num_nodes * offer.node_price_per_h for offer in problem.offers.values())


def timed(work: Callable[[], Made]) -> tuple[Made, float, float]:
    """Returns the result of a call, its CPU seconds and its wall-clock seconds."""
    cpu_s, clock_s = time.process_time(), time.perf_counter()
    return work(), time.process_time() - cpu_s, time.perf_counter() - clock_s


def measure(num_accelerators: int, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{seed}/{num_accelerators}")
    machines, asked = inventory(num_accelerators, draw), workload(num_accelerators, draw)
    problem, columns_s, columns_clock_s = timed(lambda: problem_of(machines, asked))
    budget = BUDGET_SHARE * whole_price(problem)
    plan, search_s, search_clock_s = timed(lambda: fastest(problem, budget))
    assert plan.solution is not None, f"no plan for {num_accelerators} accelerators, seed {seed}"
    assert plan.certificate is not None
    broken = check(problem, plan.solution, plan.certificate, budget)
    assert not broken, broken
    saving, cheapest_s, _ = timed(lambda: cheapest(problem, SLACK * plan.tokens_per_s))
    assert saving.solution is not None
    return {
        "accelerators": num_accelerators,
        "seed": seed,
        "model": asked.model.name,
        "gangs": len(problem.gangs),
        "columns": len(problem.rollout),
        "columns_s": columns_s,
        "search_s": search_s,
        "seconds": columns_s + search_s,
        "clock_s": columns_clock_s + search_clock_s,
        "cheapest_s": cheapest_s,
        "gap": plan.certificate.gap,
        "by_solver": len(unproven(problem, plan.certificate)),
    }


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Returns rows with the worst seconds of every size, and their ratio to those of the size before."""
    rows, before = [], None
    for size in SIZES:
        of_size = [run for run in runs if run["accelerators"] == size]
        worst = {key: max(run[key] for run in of_size) for key in of_size[0] if key != "model"}
        growth = f"x{worst['seconds'] / before:.1f}" if before else ""
        counts = [f"{worst['columns']:,} + {worst['gangs']:,}", f"{worst['gap']:.3%}", f"{worst['by_solver']}"]
        seconds = [f"{worst[key]:.2f}" for key in ("seconds", "clock_s", "columns_s", "search_s", "cheapest_s")]
        rows.append([f"{size:,}", seconds[0], growth, *seconds[1:], *counts])
        before = worst["seconds"]
    return rows


def worst_bar(target: float, values: list[float], *, quick: bool) -> report.Bar:
    """Returns the bar for the worst run. A single problem of a size decides only if it is far from the target."""
    holds = report.at_most(target, [max(values)], quick=quick).holds
    return report.Bar(round(max(values), 6), target, holds, (round(min(values), 6), round(max(values), 6)))


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the planner takes, by the number of accelerators.")
    parser.add_argument("--quick", action="store_true", help="one problem of a size: ends within a minute")
    quick = parser.parse_args().quick
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs = [measure(size, seed) for size in SIZES for seed in range(1 if quick else NUM_SEEDS)]
    bars = {
        f"seconds at {size:,} accelerators": worst_bar(
            target, [run["seconds"] for run in runs if run["accelerators"] == size], quick=quick
        )
        for size, target in TARGETS_S.items()
    }
    bars["proven gap"] = worst_bar(0.01, [run["gap"] for run in runs], quick=quick)
    header = ["accelerators", "s (worst)", "growth", "by the clock", "columns s", "search s", "cheapest s"]
    header += ["columns + gangs", "gap", "gangs on the solver's word"]
    report.show("planner_scale", header, table(runs), bars, quick=quick, asked_gap=GAP, runs=runs)


if __name__ == "__main__":
    main()
