"""`offbeat simulate`: what a run would do on a fleet, on a plan's machines, or with other settings than it had."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.files import write_atomic

if TYPE_CHECKING:
    from offbeat.simulator.lengths import Lengths
    from offbeat.simulator.simulation import Scenario


def add_arguments(parser: Parser) -> None:
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="what to simulate: rules, workers, lengths")
    parser.add_argument("--plan", metavar="PLAN.json", help="take the workers and the trainer from a saved plan")
    parser.add_argument("--constants", metavar="FILE", help="constants of the cost model, with --plan")
    parser.add_argument("--replay", metavar="RUN", help="simulate a finished run again, with its workers and lengths")
    what_if = parser.add_argument_group("what if")
    what_if.add_argument(
        "--workers", metavar="[NAME:]+N", help="N more workers, or fewer with -N; of all kinds the first"
    )
    what_if.add_argument("--max-staleness", metavar="S", type=int, help="another bound on staleness")
    what_if.add_argument("--over-provision", metavar="R", help="another over-provision factor, or auto")
    what_if.add_argument("--steps", metavar="N", type=int, help="another number of steps")
    what_if.add_argument("--seed", metavar="N", type=int, help="another seed of the simulation's random numbers")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--trace", metavar="FILE.json", help="write what everyone did when, for Perfetto")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw where the time went")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.simulator import report
    from offbeat.simulator.simulation import Simulation

    _check_words(arguments)
    scenario, lengths, title = _replayed(arguments) if arguments.replay else _configured(arguments)
    scenario = _what_if(arguments, scenario)
    simulation = Simulation(scenario, lengths, records_spans=arguments.trace is not None)
    simulation.run()
    found = report.figures(simulation)
    if arguments.trace:
        report.write_trace(simulation, Path(arguments.trace))
    if arguments.picture and found["steps"]:
        write_atomic(Path(arguments.picture), report.picture(found, title).encode())
    print(report.to_json(found) if arguments.json else report.to_text(found, title))
    return 0 if found["steps"] == scenario.ledger.num_steps else 1


def _check_words(arguments: argparse.Namespace) -> None:
    if (arguments.config is None) == (arguments.replay is None):
        raise UserError("give either CONFIG.toml or --replay RUN: what to simulate")
    if arguments.replay and arguments.plan:
        raise UserError("--plan and --replay do not go together; --replay takes the workers of the run")
    for name, least in (("steps", 1), ("max_staleness", 0), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
    for name in ("trace", "picture"):
        path = getattr(arguments, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise UserError(f"--{name} {path}: the folder {Path(path).parent} does not exist; create it")


def _configured(arguments: argparse.Namespace) -> tuple[Scenario, Lengths, str]:
    from offbeat.simulator.scenario_file import load_scenario, scenario_of
    from offbeat.tools.recorded_run import group_lengths

    file, origin = load_scenario(arguments.config)
    if not arguments.plan:
        scenario, lengths = scenario_of(file, origin, read_run=group_lengths)
        return scenario, lengths, arguments.config
    from offbeat.launch.run_folder import trained_lengths
    from offbeat.planner.cost import constants as constant_files
    from offbeat.planner.inputs.inventory import load_inventory
    from offbeat.planner.inputs.workload_file import load_workload
    from offbeat.planner.plan import from_json
    from offbeat.simulator.planned import planned_fleet, planned_trainer

    folder = Path(arguments.config).parent
    if file.cluster is None or file.workload is None:
        raise UserError(
            f"{arguments.config}: --plan needs cluster and workload at the top of this file, the files from which the "
            "plan was made"
        )
    inventory, workload = (
        load_inventory(str(folder / file.cluster)),
        load_workload(folder / file.workload, trained_lengths),
    )
    constants = constant_files.load(Path(arguments.constants)) if arguments.constants else constant_files.Constants()
    try:
        text = Path(arguments.plan).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"--plan {arguments.plan} cannot be read: {reason}; give the output of offbeat plan --json"
        ) from None
    plan = from_json(text, arguments.plan)
    fleet = planned_fleet(plan, inventory, workload, constants)
    trainer = planned_trainer(plan, inventory, workload)
    scenario, lengths = scenario_of(file, origin, fleet=fleet, trainer=trainer, read_run=group_lengths)
    return scenario, lengths, f"{arguments.config} on the machines of {arguments.plan}"


def _replayed(arguments: argparse.Namespace) -> tuple[Scenario, Lengths, str]:
    from offbeat.tools.recorded_run import recorded_scenario

    scenario, lengths = recorded_scenario(Path(arguments.replay))
    return scenario, lengths, f"{arguments.replay}, simulated"


def _what_if(arguments: argparse.Namespace, scenario: Scenario) -> Scenario:
    from offbeat.spelling import suggest

    ledger = scenario.ledger
    if arguments.steps is not None:
        ledger = replace(ledger, num_steps=arguments.steps)
        scenario = replace(scenario, num_warmup=min(scenario.num_warmup, arguments.steps - 1))
    if arguments.max_staleness is not None:
        bound = arguments.max_staleness
        ledger = replace(ledger, max_staleness=bound, in_rounds=not scenario.overlap and bound > 0)
        if bound == 0 and scenario.overlap:
            raise UserError("--max-staleness is 0; it must be 1 or more where generation overlaps with training")
        factor = scenario.over_provision
        if bound == 0:
            scenario = replace(scenario, over_provision=1.0)
        elif factor != "auto":
            scenario = replace(scenario, over_provision=min(factor, bound + 1.0))
    if arguments.over_provision is not None:
        scenario = replace(scenario, over_provision=_factor(arguments.over_provision, ledger.max_staleness))
    if arguments.seed is not None:
        scenario = replace(scenario, seed=arguments.seed)
    if arguments.workers is not None:
        name, _, change = arguments.workers.rpartition(":")
        names = [kind.name for kind in scenario.fleet]
        name = name or names[0]
        if name not in names:
            raise UserError(
                f"--workers {arguments.workers}: no workers {name!r}; {suggest(name, names, lists_few=True)}"
            )
        try:
            count = int(change)
        except ValueError:
            raise UserError(f"--workers {arguments.workers}: write it like +2, -1 or {name}:+2") from None
        fleet = [replace(kind, count=kind.count + count) if kind.name == name else kind for kind in scenario.fleet]
        if any(kind.count < 0 for kind in fleet) or not sum(kind.count for kind in fleet):
            raise UserError(
                f"--workers {arguments.workers}: leaves no worker; {name} has {scenario.fleet[names.index(name)].count}"
            )
        scenario = replace(scenario, fleet=tuple(fleet))
    return replace(scenario, ledger=ledger)


def _factor(text: str, bound: int) -> float | Literal["auto"]:
    if text == "auto":
        return "auto" if bound else 1.0
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= bound + 1:
        raise UserError(f"--over-provision is {text}; it must be auto, or from 1 to max_staleness + 1 = {bound + 1}")
    return factor
