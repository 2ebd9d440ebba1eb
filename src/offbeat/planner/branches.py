"""Parts of all plans, by which classes of nodes generate, so that a version's lags are known before nodes are chosen.

A lag depends on who else receives the version: a sender's port is divided among its receivers, and a second node of a
class gets the version over the link inside the class. Columns assume the best case. Where that promises too much, the
search goes through the branches: in each, it is fixed whether a class generates on no node, on one, or on more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.nodes import NodeFabric, fabric_of
from offbeat.planner.place.realised import Arrivals, arrivals
from offbeat.planner.place.sync_tree import relay
from offbeat.planner.problem import Branch, Gang, PlanningProblem, RolloutColumn

MAX_BRANCHES = 108
NONE, ONE, SOME, MANY, BOTH = "none", "one", "some", "many", "both"
LEAST = {NONE: 0, ONE: 1, SOME: 1, MANY: 2}
"""Smallest number of nodes in each state."""


def branches(problem: PlanningProblem, inventory: Inventory) -> list[Branch]:
    """Returns branches that together hold every plan. The list is empty if there would be too many, or if links between
    single nodes were measured, with which lags depend on more than numbers of nodes."""
    if inventory.measured:
        return []
    rented = sorted({column.offer for column in problem.rollout if not column.is_home})
    states = [_states(inventory, name) for name in rented]
    takes_turns = not problem.demand.bound and any(column.is_home for column in problem.rollout)
    homes = (NONE, ONE, MANY, BOTH) if takes_turns else ("",)
    found = [
        Branch(dict(zip(rented, chosen, strict=True)), home)
        for *chosen, home in itertools.islice(itertools.product(*states, homes), MAX_BRANCHES + 1)
        if home != NONE or any(state != NONE for state in chosen)
    ]
    return found if len(found) <= MAX_BRANCHES else []


def _states(inventory: Inventory, name: str) -> tuple[str, ...]:
    """States of a class that have to be told apart: one node and more of them only if the link inside the class is not
    the fastest way to it."""
    if inventory.classes[name].num_nodes == 1:
        return NONE, ONE
    within = inventory.link(name, name).bytes_per_s
    others = [inventory.link(name, other).bytes_per_s for other in inventory.classes if other != name]
    return (NONE, ONE, MANY) if any(rate > within for rate in others) else (NONE, SOME)


def within(problem: PlanningProblem, inventory: Inventory, workload: Workload, branch: Branch) -> PlanningProblem:
    """Returns the problem restricted to a branch, with the lags that its plans have at best."""
    if not branch.nodes:
        return problem
    lags = {root: _least_lags(inventory, workload, root, branch) for root in {gang.root for gang in problem.gangs}}

    shared: dict[tuple[str, bool], dict[str, float]] = {}

    def exact(column: RolloutColumn) -> RolloutColumn:
        if column.is_home and branch.at_home != MANY:
            return column  # at best the weights need not be sent: replicas run on the node that publishes
        place = column.offer, column.is_home
        if place not in shared:
            known = {root: each.of(column) for root, each in lags.items() if column.offer in each.by_class}
            shared[place] = {**column.lag_s, **known}
        return replace(column, lag_s=shared[place], lag_over_s={})

    allowed = {name for name, state in branch.nodes.items() if state != NONE}
    gangs = problem.gangs
    if branch.at_home == ONE:
        gangs = tuple(_on_one_node(problem, gang) for gang in gangs)
    elif branch.at_home in (MANY, BOTH):
        is_both = branch.at_home == BOTH
        gangs = tuple(g for g in gangs if sum(g.nodes.values()) > 1 and (len(g.nodes) > 1) == is_both)
    return replace(
        problem,
        offers={
            name: replace(
                offer,
                most_generating={NONE: 0, ONE: 1}.get(branch.nodes.get(name, NONE)),
                least_generating=LEAST[branch.nodes.get(name, NONE)],
            )
            for name, offer in problem.offers.items()
        },
        rollout=tuple(
            exact(column)
            for column in problem.rollout
            if (branch.at_home != NONE if column.is_home else column.offer in allowed)
        ),
        gangs=gangs,
    )


def _on_one_node(problem: PlanningProblem, gang: Gang) -> Gang:
    """Returns a copy of the gang of which at most one node of each class generates too."""
    cards = {name: min(num, 1) * problem.offers[name].per_node for name, num in gang.nodes.items()}
    return replace(gang, home_cards=cards)


def _least_lags(inventory: Inventory, workload: Workload, root: str, branch: Branch) -> Arrivals:
    """Returns the shortest times in which generating classes can have a version of the class `root`, over all numbers
    of nodes of the branch."""
    fabric, free = fabric_of(inventory), {name: each.num_nodes for name, each in inventory.classes.items()}
    num_home = 2 if branch.at_home == MANY and free[root] > 1 else 1
    free[root] -= num_home
    found: list[Arrivals] = []
    # Few nodes divide few ports, and many nodes have many ports to send on from.
    for most in (0, 2, 3, max(free.values())):
        counts = {
            name: min(max(LEAST[state], most), {NONE: 0, ONE: 1}.get(state, free[name]), free[name])
            for name, state in branch.nodes.items()
        }
        found.append(_arrivals(fabric, workload, root, counts, num_home))
    return Arrivals(_least([each.rented_s for each in found]), _least([each.home_s for each in found]))


def _least(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for each in times for name in each}
    return {name: min(each[name] for each in times if name in each) for name in sorted(names)}


def _arrivals(fabric: NodeFabric, workload: Workload, root: str, counts: Mapping[str, int], num_home: int) -> Arrivals:
    """Returns the times if the first of `num_home` training nodes of the class `root` publishes, these train and
    generate, and `counts` further nodes generate."""
    taken = {root: num_home}
    rolls = [f"{name}-{i + taken.get(name, 0)}" for name, num in counts.items() for i in range(num)]
    home = [f"{root}-{i}" for i in range(num_home)]
    num_bytes = update_bytes(workload)
    return arrivals(fabric, relay(fabric, home[0], [*rolls, *home], num_bytes), num_bytes, home)
