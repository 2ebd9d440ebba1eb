"""`offbeat plan`: chooses the machines to rent for a workload, and which of them train and which generate."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.planner.cost.constants import Constants
    from offbeat.planner.inputs.hardware import Inventory
    from offbeat.planner.inputs.workload import Workload
    from offbeat.planner.plan import Plan


def add_arguments(parser: Parser) -> None:
    parser.add_argument("cluster", metavar="CLUSTER.toml", help="machines that are available")
    parser.add_argument(
        "workload", metavar="WORKLOAD.toml", help="the model, prompt and answer lengths, and the size of a step"
    )
    aim = parser.add_mutually_exclusive_group()
    aim.add_argument(
        "--budget",
        metavar="$/h",
        type=float,
        help="the most to spend; 0: only machines that cost nothing; without it, all",
    )
    aim.add_argument("--throughput", metavar="TOK/S", type=float, help="tokens per second to reach at the least cost")
    parser.add_argument("--constants", metavar="FILE", help="constants of the cost model, from offbeat calibrate")
    parser.add_argument("--add", metavar="NAME:NODES", action="append", default=[], help="add nodes of a class")
    parser.add_argument("--remove", metavar="NAME:NODES", action="append", default=[], help="remove nodes of a class")
    parser.add_argument(
        "--any-trainer",
        action="store_true",
        help="also plan trainers with tensor or pipeline parallelism or two classes, which Offbeat's own cannot run",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print what each limit costs, the placement and all assumptions"
    )
    parser.add_argument("--frontier", metavar="FILE.html", help="also draw cost against throughput")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--verify", metavar="PLAN.json", help="check a saved plan against the same files")
    parser.epilog = "With --verify, exit status 1 if something does not hold."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _check_words(arguments)
    from offbeat.launch.run_folder import trained_lengths
    from offbeat.planner.cost import constants as files
    from offbeat.planner.inputs.inventory import load_inventory
    from offbeat.planner.inputs.what_if import changed, parse_changes
    from offbeat.planner.inputs.workload_file import load_workload

    add, remove = parse_changes(arguments.add, "--add"), parse_changes(arguments.remove, "--remove")
    inventory = changed(load_inventory(arguments.cluster), add, remove)
    workload = load_workload(arguments.workload, trained_lengths)
    workload = dataclasses.replace(workload, any_trainer=arguments.any_trainer)
    constants = files.load(Path(arguments.constants)) if arguments.constants else files.Constants()
    if arguments.verify:
        return _verify(Path(arguments.verify), inventory, workload, constants)
    return _plan(arguments, inventory, workload, constants)


def _check_words(arguments: argparse.Namespace) -> None:
    if arguments.budget is not None and not 0 <= arguments.budget < float("inf"):
        raise UserError(
            f"--budget is {arguments.budget:g}; it must be a finite number, 0 or more (0: only machines that are free)"
        )
    if arguments.throughput is not None and not 0 < arguments.throughput < float("inf"):
        raise UserError(f"--throughput is {arguments.throughput:g}; it must be a finite number above 0")
    if arguments.json and arguments.explain:
        raise UserError(
            "--json and --explain do not go together; the JSON has the placement and all assumptions anyway"
        )
    if arguments.frontier and not Path(arguments.frontier).parent.is_dir():
        raise UserError(
            f"--frontier {arguments.frontier}: the folder {Path(arguments.frontier).parent} does not exist; create it"
        )
    if arguments.verify:
        for name in ("budget", "throughput", "frontier", "explain", "json"):
            value = getattr(arguments, name)
            if value is not None and value is not False:
                raise UserError(f"--{name} and --verify do not go together; --verify only checks a saved plan")


def _plan(arguments: argparse.Namespace, inventory: Inventory, workload: Workload, constants: Constants) -> int:
    from offbeat.planner.plan import to_json
    from offbeat.planner.planning import plan
    from offbeat.planner.report.text import format_plan, remarks_on, what_would_help

    found = plan(inventory, workload, constants=constants, budget=arguments.budget, throughput=arguments.throughput)
    drawn = _draw(Path(arguments.frontier), inventory, workload, constants) if arguments.frontier else None
    if arguments.json:
        print(to_json(found))
        return 0
    gains = what_would_help(inventory, workload, found, constants, nodes_alone=not arguments.explain)
    remarks = remarks_on(inventory, workload, found, constants)
    print(format_plan(found, gains, remarks=remarks, in_full=arguments.explain))
    if drawn is not None:
        beside = "compared with each class alone and with AReaL-Hex's split"
        print(f"\n{arguments.frontier}: {drawn} plans from the fastest to the cheapest, {beside}.")
    return 0


def _draw(file: Path, inventory: Inventory, workload: Workload, constants: Constants) -> int:
    """Writes an HTML file with a plot of price against throughput. Returns the number of plotted plans that may use
    every class of nodes in the inventory."""
    from offbeat.planner.report.frontier import frontier_page, homogeneous, mixed, split_by_class

    title = f"{workload.model.name}: cost against throughput"
    points = mixed(inventory, workload, constants)
    split = split_by_class(inventory, workload, constants)
    page = frontier_page(title, points, homogeneous(inventory, workload, constants), split)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--frontier {file} cannot be written: {error.strerror}; give another file") from None
    return len(points)


def _claim(saved: Plan) -> str:
    """Returns what a plan states, in words."""
    within = "" if saved.budget is None else f" for at most {saved.budget:,.2f} $/h"
    if saved.throughput is not None:
        return f"no plan with {saved.throughput:,.0f} tokens/s is cheaper by more than {saved.certificate.gap:.2%}"
    return f"no plan{within} is faster by more than {saved.certificate.gap:.2%}"


def _verify(file: Path, inventory: Inventory, workload: Workload, constants: Constants) -> int:
    """Checks a saved plan and prints each rule that it breaks; returns exit status 1 if there is one, otherwise 0."""
    from offbeat.planner.plan import from_json
    from offbeat.planner.verifying import verify

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--verify {file} cannot be read: {reason}; give the output of offbeat plan --json") from None
    saved = from_json(text, str(file))
    broken = verify(saved, inventory, workload, constants)
    for line in broken:
        print(line)
    print(f"{len(broken)} rules do not hold" if broken else f"everything holds: {_claim(saved)}")
    return 1 if broken else 0
