"""Tries to catch the planner: `python -m benchmarks.planner_honesty [--quick] [--seed N]`.

Clusters come from a generator of this benchmark, with links down to 0.05 GB/s, single nodes and small budgets. Checked
are: whether the placed plan keeps what the program promised; whether a solve in which all gangs have their placed times
finds something better; whether counting plans (`brute_force`) does; whether the answer survives splitting a class in
two, other names, other prices and a useless free machine; how long an answer takes; and whether forged plans are
refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks import report
from benchmarks.planner_honesty import areal
from benchmarks.planner_honesty.brute_force import shortest_s
from benchmarks.planner_honesty.clusters import Case, cases, dearer, in_halves, known_cases, relabelled, with_a_gift
from benchmarks.planner_honesty.forgeries import canonical, forged
from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.place.placing import Placer
from offbeat.planner.place.realised import Arrivals, slowed
from offbeat.planner.plan import Plan, from_json, to_json
from offbeat.planner.planning import plan
from offbeat.planner.solve.search import fastest
from offbeat.planner.verifying import verify

SEED = 2025
NUM_RANDOM, NUM_QUICK = 60, 3
NUM_FORGERIES, NUM_QUICK_FORGERIES = 2_000, 20
NUM_QUICK_KNOWN = 4
"""Known cases of a quick run: two over slow links, and one node for two bounds."""
SAME_CASES: tuple[Callable[[Case], Case | None], ...] = (in_halves, relabelled, dearer, with_a_gift)
KEPT = 0.02
GAP = 0.01
LIMIT_S = 5.0
BUDGETS = (0.02, 0.1, 0.3, 0.6)
"""Shares of the price of all machines."""


def made(case: Case) -> tuple[Plan | None, float, str]:
    """Returns the plan of a case, the seconds that it took, and why there is none."""
    started_s = time.process_time()
    try:
        found = plan(case.inventory, case.workload, budget=case.budget)
    except UserError as error:
        return None, time.process_time() - started_s, str(error)
    return found, time.process_time() - started_s, ""


def better_by_placed(case: Case, found: Plan) -> float:
    """Share by which a plan that is solved with the placed times of all gangs, and then placed, is faster."""
    problem = problem_of(case.inventory, case.workload)
    placer = Placer(case.inventory, case.workload, Constants(), problem)
    for gang in problem.gangs:
        if gang.period_s < found.step.tau_s:
            problem = slowed(problem, gang, placer.best_step_s(gang), Arrivals())
    result = fastest(problem, case.budget)
    if result.solution is None:
        return 0.0
    placed = dataclasses.replace(placer, problem=problem).place(result.solution)
    return max(found.step.tau_s / placed.tau_s - 1, 0.0)


def look(case: Case) -> dict[str, Any]:
    found, seconds, why = made(case)
    row: dict[str, Any] = {"case": case.name, "seconds": seconds, "why": why}
    if found is None:
        if case.is_small:
            far = shortest_s(case, 1e7, 0.0)
            row["missed"] = far < 1e7
        return row
    row |= {"tau_s": found.step.tau_s, "gap": found.certificate.gap, "tau_lo_s": found.step.tau_lo_s}
    lowest = found.step.tau_lo_s or found.step.tau_s
    row["placed_over_promised"] = found.step.tau_s / lowest / (1 + found.certificate.gap) - 1
    row["better_by_placed"] = better_by_placed(case, found)
    row["verified"] = verify(found, case.inventory, case.workload)
    if case.is_small:
        row["better_by_counting"] = found.step.tau_s / shortest_s(case, found.step.tau_s, 1e-3) - 1
    for change in SAME_CASES:
        if (other := change(case)) is not None:
            again, more_s, _ = made(other)
            row["seconds"] = max(row["seconds"], more_s)
            row[change.__name__] = again.step.tau_s / found.step.tau_s - 1 if again else float("inf")
    whole = sum(each.node_price_per_h * each.num_nodes for each in case.inventory.classes.values())
    for share in BUDGETS if whole else ():
        row["seconds"] = max(row["seconds"], made(dataclasses.replace(case, budget=round(whole * share, 2)))[1])
    return row


def try_forgeries(chosen: list[Case], num: int, draw: random.Random) -> dict[str, Any]:
    plans = [(case, found) for case in chosen if (found := made(case)[0]) is not None]
    accepted, tracebacks = [], []
    for number in range(num):
        case, found = plans[number % len(plans)]
        document = json.loads(to_json(found))
        text, paths = forged(document, draw)
        try:
            saved = from_json(text)
            is_refused = bool(verify(saved, case.inventory, case.workload))
        except UserError:
            continue
        except Exception:  # noqa: BLE001 - any traceback is what is looked for
            tracebacks.append(
                {"case": case.name, "paths": [list(path) for path in paths], "error": traceback.format_exc()}
            )
            continue
        states_the_same = canonical(json.loads(to_json(saved))) == canonical(document)
        if not is_refused and not states_the_same:
            accepted.append({"case": case.name, "paths": [list(path) for path in paths]})
    return {"tried": num, "accepted": accepted, "tracebacks": tracebacks}


def bars(rows: list[dict[str, Any]], forgeries: dict[str, Any]) -> dict[str, report.Bar]:
    def most(name: str, target: float, over: str = "") -> report.Bar:
        values = [row[name] - (row[over] if over else 0.0) for row in rows if name in row]
        return report.Bar(
            round(max(values), 5), target, max(values) <= target, (round(min(values), 5), round(max(values), 5))
        )

    def none(num: int) -> report.Bar:
        return report.Bar(num, 0, num == 0, (num, num))

    found = {
        "placed over promised": most("placed_over_promised", KEPT),
        "better with placed times of all gangs": most("better_by_placed", KEPT),
        "proven gap": most("gap", GAP),
        "better by counting, beyond the gap": most("better_by_counting", 1e-3, "gap"),
        "seconds for an answer": most("seconds", LIMIT_S),
        "cases with a plan that was not found": none(sum(row.get("missed", False) for row in rows)),
        "plans that do not verify": none(sum(bool(row.get("verified")) for row in rows)),
        "forgeries accepted": none(len(forgeries["accepted"])),
        "tracebacks": none(len(forgeries["tracebacks"])),
    }
    for change in SAME_CASES:
        found[f"lost by {change.__name__}, beyond the gap"] = most(change.__name__, 1e-9, "gap")
    off = [abs(ratio - 1) for ratio in areal.ratios(areal.speeds()).values()]
    found["AReaL's gains by bound, largest error"] = report.Bar(
        round(max(off), 4), 0.2, max(off) <= 0.2, (round(min(off), 4), round(max(off), 4))
    )
    single = [row for row in rows if row["case"].startswith("one node of 8")]
    found["one node of 8: bounds without a plan"] = none(sum(bool(row["why"]) for row in single))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Tries to catch the planner.")
    parser.add_argument("--quick", action="store_true", help="few clusters: ends within a minute")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random clusters (default: %(default)s)")
    parser.add_argument("--num", type=int, help=f"random clusters (default: {NUM_RANDOM}; quick: {NUM_QUICK})")
    parser.add_argument("--only", help="only cases whose names contain this")
    options = parser.parse_args()
    num = options.num or (NUM_QUICK if options.quick else NUM_RANDOM)
    chosen = [case for case in cases(num, options.seed) if not options.only or options.only in case.name]
    if options.quick:
        chosen = [*chosen[:NUM_QUICK_KNOWN], *(case for case in chosen if case.is_small)]
    rows = []
    for case in chosen:
        rows.append(look(case))
        told = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in rows[-1].items()}
        report.say(
            "planner_honesty", ", ".join(f"{key} {value}" for key, value in told.items() if value not in ("", []))
        )
    small = [case for case in (*chosen, *known_cases()) if case.is_small][:8] or chosen
    forgeries = try_forgeries(
        small, NUM_QUICK_FORGERIES if options.quick else NUM_FORGERIES, random.Random(options.seed)
    )
    names = ("gap", "better_by_counting", "better_by_placed", *(change.__name__ for change in SAME_CASES), "seconds")
    table = [[row["case"], *(f"{row[name]:.2%}" if name in row and name != "seconds" else "" for name in names[:-1]),
              f"{row['seconds']:.2f}"] for row in rows]  # fmt: skip
    found = bars(rows, forgeries)
    report.show(
        "planner_honesty",
        ("case", *(name.replace("_", " ") for name in names)),
        table,
        {name: dataclasses.replace(bar, holds=None) if options.quick else bar for name, bar in found.items()},
        quick=options.quick,
        seed=options.seed,
        looked=rows,
        forgeries=forgeries,
    )


if __name__ == "__main__":
    main()
