"""How long the planner takes, 64 to 65,536 accelerators of 8 classes: `python -m benchmarks.planner_scale [--quick]`.

One process on one core makes the fastest plan for half of what everything would cost, proof included, to a gap of
0.1 %, and has it checked without a solver (not timed). Problems come from `made_up`, which draws columns and gangs
of the kind that the cost model makes: 8 classes, some 20 shapes of replica on each, gangs of one and of two classes.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import report
from offbeat.plan.check import check, unproven
from offbeat.plan.problem import Demand, Gang, Offer, Problem, RolloutColumn
from offbeat.plan.search import GAP, Result, cheapest, fastest

SIZES = (64, 256, 1_024, 4_096, 16_384, 65_536)
NUM_CLASSES = 8
PER_NODE = 8
TARGETS_S = {1_024: 2.0, 16_384: 10.0}
BUDGET_SHARE = 0.5
ANSWER_TOKENS = 4_000.0


@dataclass(frozen=True)
class Card:
    """Of a made-up class: relative to a middling card."""

    name: str
    compute: float
    memory: float
    price_per_h: float


def cards(rng: random.Random) -> list[Card]:
    made = []
    for index in range(NUM_CLASSES):
        compute, memory = rng.uniform(0.2, 2.5), rng.uniform(0.4, 2.2)
        price = (1.2 * compute + 0.8 * memory) * rng.uniform(0.7, 1.4)
        made.append(Card(f"class{index}", compute, memory, round(price, 2)))
    return made


def shapes(card: Card, all_cards: Sequence[Card], rng: random.Random) -> list[RolloutColumn]:
    """By tensor parallelism and concurrency: a step reads the weights once, and every trajectory's context."""
    made = []
    blocking = {root.name: (0.5 if root is card else 1.5) * rng.uniform(0.5, 2.0) for root in all_cards}
    for tp in (1, 2, 4, 8):
        for concurrency in (8, 16, 32, 64, 128):
            batch = concurrency * tp
            token_s = 0.004 + 0.008 / (tp * card.memory) + batch * (8e-5 / card.memory + 6e-5 / card.compute) / tp**0.9
            name = f"{card.name} tp{tp} b{batch}"
            made.append(RolloutColumn(name, card.name, tp, tp, batch, batch / token_s, token_s, blocking))
    return made


def gangs(all_cards: Sequence[Card], num_nodes: int, tokens: float) -> list[Gang]:
    """Of 1 to all nodes of a class, and of two classes in step, with efficiency that falls with size."""
    sizes = sorted({max(1, round(num_nodes * share / 12)) for share in range(1, 13)})
    made = []
    for index, card in enumerate(all_cards):
        for other in [None, *all_cards[index + 1 : index + 3]]:
            for size in sizes:
                power = size * (card.compute + (0.9 * other.compute if other else 0.0))
                step_s = tokens / (40_000.0 * power) * (1 + 0.05 * size**0.5) + 2.0
                nodes = {card.name: size} | ({other.name: size} if other else {})
                name = " + ".join(f"{num} {key}" for key, num in nodes.items())
                made.append(Gang(name, nodes, card.name, step_s, 1.0))
    return made


def made_up(num_accelerators: int, seed: int) -> Problem:
    """A problem of the size; whoever has an inventory and a workload puts the cost model's columns here."""
    rng = random.Random(seed)
    all_cards = cards(rng)
    num_nodes = max(1, num_accelerators // PER_NODE // NUM_CLASSES)
    trajectories = 16 * num_accelerators
    tokens = trajectories * ANSWER_TOKENS
    offers = {c.name: Offer(c.name, num_nodes, PER_NODE, round(c.price_per_h * PER_NODE, 2)) for c in all_cards}
    rollout = tuple(column for card in all_cards for column in shapes(card, all_cards, rng))
    demand = Demand(trajectories, tokens, bound=2, tail_tokens=4 * ANSWER_TOKENS, lag_s=5.0)
    return Problem(offers, rollout, tuple(gangs(all_cards, num_nodes, tokens)), demand)


def whole_price(problem: Problem) -> float:
    return sum(offer.num_nodes * offer.node_price_per_h for offer in problem.offers.values())


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    start_s = time.perf_counter()
    return work(), time.perf_counter() - start_s


def measure(num_accelerators: int, seed: int) -> dict[str, float]:
    problem = made_up(num_accelerators, seed)
    budget = BUDGET_SHARE * whole_price(problem)
    plan, seconds = timed(lambda: fastest(problem, budget))
    assert plan.solution is not None, f"no plan for {num_accelerators} accelerators, seed {seed}"
    assert plan.certificate is not None
    broken = check(problem, plan.solution, plan.certificate, budget)
    assert not broken, broken
    saving, cheap_s = timed(lambda: cheapest(problem, 0.7 * plan.tokens_per_s))
    assert saving.solution is not None
    return {
        "accelerators": num_accelerators,
        "seed": seed,
        "gangs": len(problem.gangs),
        "columns": len(problem.rollout),
        "seconds": seconds,
        "cheapest_seconds": cheap_s,
        "gap": plan.certificate.gap,
        "by_solver": len(unproven(problem, plan.certificate)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the planner takes, by the number of accelerators.")
    parser.add_argument("--quick", action="store_true", help="one problem of a size: ends within a minute")
    quick = parser.parse_args().quick
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs = [measure(size, seed) for size in SIZES for seed in range(1 if quick else 5)]
    by_size = {size: [run for run in runs if run["accelerators"] == size] for size in SIZES}
    bars = {
        f"seconds_{size}": report.at_most(target, [run["seconds"] for run in by_size[size]], quick=quick)
        for size, target in TARGETS_S.items()
    }
    bars["gap"] = report.at_most(0.01, [run["gap"] for run in runs], quick=quick)
    rows, before = [], None
    for size, of_size in by_size.items():
        worst = max(run["seconds"] for run in of_size)
        growth = f"x{worst / before:.1f}" if before else ""
        cheap, gap = max(run["cheapest_seconds"] for run in of_size), max(run["gap"] for run in of_size)
        word = max(run["by_solver"] for run in of_size)
        rows.append([f"{size:,}", f"{worst:.2f}", growth, f"{cheap:.2f}", f"{gap:.3%}", f"{word:g}"])
        before = worst
    header = ["accelerators", "s (worst)", "growth", "cheapest s", "gap", "gangs on the solver's word"]
    report.show("planner_scale", header, rows, bars, quick=quick, asked_gap=GAP, runs=runs)


if __name__ == "__main__":
    main()
