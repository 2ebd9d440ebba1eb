"""Verifies a saved plan against its input files, without a solver: constraints, proof and every field.

`solve.check` checks constraints and proof. All other fields follow from the solution by arithmetic, so they are
computed again from the solution and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.placing import Placer
from offbeat.planner.plan import Plan
from offbeat.planner.planning import compose
from offbeat.planner.solve.certificate import distance
from offbeat.planner.solve.check import check

ROUNDING = 1e-6
"""Tolerance when gaps are compared: prices are proven in whole millionths of a dollar."""


def verify(saved: Plan, inventory: Inventory, workload: Workload, constants: Constants | None = None) -> list[str]:
    """Checks a saved plan against its inputs. Returns one line per violation; the list is empty if the plan is valid.
    `constants` are those of the cost model (None: the defaults)."""
    constants = constants or Constants()
    problem = problem_of(inventory, workload, constants)
    if broken := check(problem, saved.solution, saved.certificate, saved.budget):
        return broken
    proof, is_for_price = saved.certificate, saved.throughput is not None
    real = distance(proof, saved.solution.tau_s, saved.step.price_per_h, is_for_price=is_for_price)
    if proof.gap < real - ROUNDING:
        broken.append(f"certificate: its gap is {proof.gap:.2%}, but the plan is {real:.2%} above the proven bound")
    if saved.throughput is not None and saved.step.tokens_per_s < saved.throughput * (1 - 1e-9):
        broken.append(
            f"throughput: the plan reaches {saved.step.tokens_per_s:g} tokens/s, but {saved.throughput:g} were asked "
            "for"
        )
    try:
        placing = Placer(inventory, workload, constants, problem).place(saved.solution)
        asked = (saved.solution, saved.certificate, saved.budget, saved.throughput, saved.note)
        again = compose(inventory, workload, constants, placing, *asked)
    except UserError as error:
        return [*broken, f"placement: {error}"]
    return broken + [f"record: {line}" for line in differences(saved, again)]


def differences(saved: object, again: object, path: str = "") -> Iterator[str]:
    """Yields a line for each field in which `saved` and `again` differ, with both values; `path` is the dotted name of
    `saved` in the plan."""
    if saved == again:
        return
    if is_dataclass(saved) and type(saved) is type(again):
        for each in fields(saved):
            where = f"{path}.{each.name}" if path else each.name
            yield from differences(getattr(saved, each.name), getattr(again, each.name), where)
    elif isinstance(saved, tuple) and isinstance(again, tuple) and len(saved) == len(again):
        for index, (one, other) in enumerate(zip(saved, again, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    else:
        yield f"{path} is {_brief(saved)} in the plan, but the input files give {_brief(again)}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
