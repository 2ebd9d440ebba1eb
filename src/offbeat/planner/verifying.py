"""Verifies a saved plan against its input files: the question, constraints, proof and every field.

`solve.check` checks constraints, and the proof as far as it is arithmetic, without a solver. Gangs that the proof
leaves to the solver are given to it again. All other fields follow from the solution by arithmetic, so they are
computed again from the solution and compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from offbeat.errors import UserError
from offbeat.planner.branches import branches, within
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory, with_alike_joined
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.placing import Placer
from offbeat.planner.plan import Plan
from offbeat.planner.planning import compose, question_of
from offbeat.planner.problem import Branch, PlanningProblem
from offbeat.planner.solve.certificate import BranchProof, Certificate, distance
from offbeat.planner.solve.check import check, unproven
from offbeat.planner.solve.program import Status, highs
from offbeat.planner.solve.search import GAP, Search, cheapest, find
from offbeat.planner.solve.view import micros, view_of

ROUNDING = 1e-9
"""Relative difference that counts as rounding."""


def verify(saved: Plan, inventory: Inventory, workload: Workload, constants: Constants | None = None) -> list[str]:
    """Checks a saved plan against its inputs. Returns one line per violation; the list is empty if the plan is valid.
    `constants` are those of the cost model (None: the defaults)."""
    constants = constants or Constants()
    inventory = with_alike_joined(inventory)
    if saved.takes_turns:
        if line := _turns_row(saved, inventory, workload, constants):
            return [line]
        workload = dataclasses.replace(workload, bound=0)
    if broken := [*_question_rows(saved, inventory, workload, constants)]:
        return broken
    problem = problem_of(inventory, workload, constants)
    if broken := check(problem, saved.solution, saved.certificate, saved.budget):
        return broken
    placer = Placer(inventory, workload, constants, problem)
    broken = [*_bound_rows(saved, placer)]
    try:
        placing = placer.place(saved.solution)
        asked = (saved.solution, saved.certificate, saved.budget, saved.throughput)
        again = compose(inventory, workload, constants, placing, *asked, takes_turns=saved.takes_turns)
    except UserError as error:
        return [*broken, f"placement: {error}"]
    return broken + [f"record: {line}" for line in differences(saved, again)]


def _turns_row(saved: Plan, inventory: Inventory, workload: Workload, constants: Constants) -> str:
    """Returns why a plan may not take turns although the workload does not ask for it; empty if it may: only where
    there is no other plan."""
    if not workload.bound or not workload.colocates:
        return "takes_turns: the workload does not leave the choice, so the plan must not claim it"
    problem = problem_of(inventory, workload, constants)
    if saved.throughput is None:
        status = find(problem, saved.budget).status
    else:
        status = cheapest(problem, saved.throughput, saved.budget).status
    if status is not Status.INFEASIBLE:
        return "takes_turns: a plan that does not take turns is possible, or the solver cannot rule it out in time"
    return ""


def _question_rows(saved: Plan, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[str]:
    """Yields a line for each difference between the question that a plan says it answers and the one that its files,
    its budget and its throughput ask, and for each number of the proof that does not follow from the question."""
    proof = saved.certificate
    wanted = question_of(inventory, workload, constants, saved.budget, saved.throughput)
    if proof.question is None:
        yield "question: the plan does not say what it answers; make it again with this release"
        return
    for each in fields(wanted):
        mine, theirs = getattr(proof.question, each.name), getattr(wanted, each.name)
        if mine != theirs:
            what = "it is for other files; plan again" if each.name.endswith("sha256") else f"{mine} is not {theirs}"
            yield f"question: {each.name}: {what}"
    if saved.throughput is None:
        cap = None if saved.budget is None else micros(saved.budget)
        if proof.price_cap != cap:
            price = f"a price of {proof.price_cap} millionths of $/h"
            yield f"certificate: its proof is for {price}, but {cap} was asked for"
        return
    if saved.throughput <= 0:
        yield f"question: throughput is {saved.throughput:g}; it must be above 0"
        return
    tau_s = workload.generated_tokens_per_step / saved.throughput
    if not math.isclose(proof.tau_lo_s, tau_s, rel_tol=1e-9):
        yield f"certificate: its proof is for a period of {proof.tau_lo_s:g} s, but {tau_s:g} s was asked for"
    if proof.price_cap is None:
        yield "certificate: it proves no price"
    if saved.solution.tau_s > tau_s * (1 + ROUNDING):
        yield f"throughput: the plan has a step every {saved.solution.tau_s:g} s; {tau_s:g} s were asked for"


def _bound_rows(saved: Plan, placer: Placer) -> Iterator[str]:
    """Yields a line for each part of the proof that does not hold. Gangs that dual prices do not rule out are given to
    the integer program again."""
    proof = saved.certificate
    real = distance(proof, saved.solution.tau_s, saved.step.price_per_h, is_for_price=saved.throughput is not None)
    if not math.isclose(proof.gap, real, rel_tol=1e-9, abs_tol=1e-15):
        yield f"certificate: its gap is {proof.gap:.4%}, but the plan is {real:.4%} above the proven bound"
    parts = proof.branches or (BranchProof(Branch(), proof.prices, proof.by_solver),)
    if proof.branches:
        wanted = branches(placer.problem, placer.inventory)
        if [each.branch for each in parts] != wanted or proof.prices or proof.by_solver:
            yield "certificate: its branches are not those of the question, or not all of them"
            return
    for part in parts:
        problem = within(placer.problem, placer.inventory, placer.workload, part.branch)
        left = unproven(problem, dataclasses.replace(proof, prices=part.prices))
        if left != {*part.by_solver} or len(left) != len(part.by_solver):
            yield "certificate: the gangs that it leaves to the solver are not those that its dual prices leave open"
            continue
        for name in _possible(problem, left, proof):
            yield f"certificate: a better plan with gang {name} is possible, or the solver cannot rule it out in time"


def _possible(problem: PlanningProblem, names: set[str], proof: Certificate) -> list[str]:
    """Returns those of the gangs `names` for which the integer program does not rule out a plan that is better than the
    proof allows."""
    if not names or not problem.rollout:
        return []
    view = view_of(problem)
    known = {gang.name: i for i, gang in enumerate(view.gangs)}
    asked = {known[name if name in known else view.beaten[name]] for name in names}
    search = Search(view, GAP, highs)
    found = []
    for gang in sorted(asked):
        if not search.rules_out(proof.tau_lo_s, gang, proof.price_cap):
            found.append(view.gangs[gang].name)
    return found


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
