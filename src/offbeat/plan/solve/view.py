"""A problem as its solvers see it: arrays, with what cannot matter left out and with classes that are alike merged.

Order comes from figures and never from names, so that calling a class otherwise changes no answer. Merging, and leaving
out columns and gangs that another one beats in every respect, keeps every optimum; `restore` leads back to names.
Money is counted in whole millionths of a dollar, so that sums are exact.

Replicas on the gang's own nodes are columns of a *home* class, beside the class that is rented: nobody offers its
nodes, each gang brings some, and they cost nothing more. A gang's count of them is therefore negative.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.problem import Gang, Offer, Problem, RolloutColumn
from offbeat.plan.solution import Solution
from offbeat.plan.solve.lags import Floats, Ints, relays_of
from offbeat.plan.solve.pruning import efficient, efficient_gangs, figures
from offbeat.plan.solve.windows import ROUNDING, Windows, windows

MICRO = 1_000_000


def micros(price: float) -> int:
    return round(price * MICRO)


@dataclass(frozen=True)
class Counts:
    """A plan in terms of a view."""

    gang: int
    replicas: tuple[int, ...]
    """By column."""


@dataclass(frozen=True)
class View:
    """K merged classes, J rollout columns, S gangs."""

    problem: Problem
    offers: tuple[tuple[str, ...], ...]
    """Names of the classes that were merged, by merged class; home classes, which are not merged, come last."""
    is_home: NDArray[np.bool_]
    columns: tuple[tuple[RolloutColumn, ...], ...]
    """By column, the same shape on each of the classes that were merged."""
    gangs: tuple[Gang, ...]
    beaten: Mapping[str, str]
    """Gangs that were left out, each with one that beats it in every respect."""
    per_node: Ints
    num_nodes: Ints
    node_price: Ints
    group: Ints
    """The merged class of a column; ascending."""
    accelerators: Ints
    concurrency: Ints
    rate: Floats
    blocking: Floats
    """S x J: seconds of a period in which a column does not generate; where generation waits for training, that too."""
    windows: Windows
    """Which periods a column's tail fits."""
    relays: Ints
    """R: the classes over which versions may come sooner."""
    gang_nodes: Ints
    """S x K: what a gang takes of a class, below 0 where it brings a home class's nodes."""
    gang_price: Ints
    """Of its nodes."""
    period: Floats
    """The shortest period of a gang, and of the reward pool."""

    @property
    def demand_tokens(self) -> float:
        return self.problem.demand.tokens

    @property
    def is_synchronous(self) -> bool:
        return self.problem.demand.bound == 0

    @cached_property
    def in_flight_cap(self) -> float:
        """Trajectories; with bound 0 those of one step, otherwise those of `bound` steps less the queue."""
        demand = self.problem.demand
        return demand.bound * demand.trajectories - demand.queue if demand.bound else float(demand.trajectories)

    @cached_property
    def fixed_price(self) -> int:
        return micros(self.problem.fixed_price_per_h)

    @cached_property
    def free_nodes(self) -> Ints:
        """S x K: what a gang leaves, or brings."""
        return self.num_nodes - self.gang_nodes

    @cached_property
    def most_nodes(self) -> Ints:
        """By class: what replicas have at most, whatever the gang."""
        return self.free_nodes.max(axis=0, initial=0)

    def tokens(self, tau_s: float | Floats, gangs: slice | Ints = slice(None)) -> Floats:
        """Gangs x J: tokens that one replica generates in a period; 0 where the age window shuts a column out."""
        tau = np.asarray(tau_s, dtype=float)
        tau = tau[:, None] if tau.ndim else tau
        yielded = self.rate * np.maximum(tau - self.blocking[gangs], 0.0)
        return np.where(self.windows.opens_s[gangs] <= tau, yielded, 0.0)

    def opening_s(self, counts: Counts) -> Floats:
        """J: the shortest period whose age window a column's tail fits, over the classes that generate in a plan."""
        generates = np.isin(self.relays, self.group[np.array(counts.replicas) > 0])
        ways_s = self.windows.ways_s(np.array([counts.gang]))
        return ways_s[np.append(True, generates), 0].min(axis=0)

    def needs(self, tau_s: float, gangs: Ints) -> Ints:
        """Gangs x J: 0 where a column is in time anyhow, else a bit for each relay of which one has to generate."""
        in_time = self.windows.ways_s(gangs) <= tau_s
        bits = (in_time[1:] * (1 << np.arange(len(self.relays)))[:, None, None]).sum(axis=0)
        return np.where(in_time[0], 0, bits)

    def nodes(self, counts: Counts) -> Ints:
        """Nodes that the replicas of a plan need, by merged class."""
        used = np.bincount(self.group, self.accelerators * np.array(counts.replicas), len(self.per_node)).astype(int)
        return np.asarray(-(-used // self.per_node))

    def price(self, counts: Counts) -> int:
        return int(self.fixed_price + self.gang_price[counts.gang] + self.nodes(counts) @ self.node_price)

    def next_price(self, least: float) -> int:
        """The least price from `least` on that whole nodes can add up to; a millionth is left to floats."""
        step = int(np.gcd.reduce(self.node_price, initial=0)) or 1
        return self.fixed_price + max(0, math.ceil((least - 1 - self.fixed_price) / step)) * step

    def in_flight(self, counts: Counts) -> int:
        return int(self.concurrency @ np.array(counts.replicas))


def view_of(problem: Problem) -> View:
    """Raises ValueError where names repeat or where replicas of mixed sizes might not fit nodes that have the room."""
    _check(problem)
    roots = sorted({gang.root for gang in problem.gangs})
    rented = {name: efficient(_columns_of(problem, name), roots) for name in problem.offers}
    home = {name: efficient(_columns_of(problem, name, is_home=True), roots) for name in problem.offers}
    merged, own = _merged(problem, rented, roots), _homes(problem, home, roots)
    columns = tuple(
        shapes
        for groups, by_offer in ((merged, rented), (own, home))
        for names in groups
        for shapes in zip(*(by_offer[name] for name in names), strict=True)
    )
    sizes = [len(rented[names[0]]) for names in merged] + [len(home[names[0]]) for names in own]
    gangs, beaten = efficient_gangs(problem, partial(_gang_nodes, merged=merged, own=own), own, columns)
    first = [problem.offers[names[0]] for names in (*merged, *own)]
    offered = [sum(problem.offers[name].num_nodes for name in names) for names in merged]
    prices = [micros(problem.offers[names[0]].node_price_per_h) for names in merged]
    passing = relays_of(problem)
    relays = [k for k, names in enumerate(merged) if passing.issuperset(names)]
    blocking, fitting = windows(problem, gangs, columns, [merged[k][0] for k in relays])
    reward_s = problem.demand.trajectories / problem.demand.reward_rate if problem.demand.reward_rate else 0.0
    gang_nodes = _gang_nodes(gangs, merged, own)
    node_price = np.array(prices + [0] * len(own), dtype=np.int64)
    return View(
        problem=problem,
        offers=(*merged, *own),
        is_home=np.arange(len(first)) >= len(merged),
        columns=columns,
        gangs=gangs,
        beaten=beaten,
        per_node=np.array([offer.per_node for offer in first], dtype=np.int64),
        num_nodes=np.array(offered + [0] * len(own), dtype=np.int64),
        node_price=node_price,
        group=np.repeat(np.arange(len(first)), np.array(sizes, dtype=np.int64)),
        accelerators=np.array([shapes[0].num_accelerators for shapes in columns], dtype=np.int64),
        concurrency=np.array([shapes[0].concurrency for shapes in columns], dtype=np.int64),
        rate=np.array([shapes[0].tokens_per_s for shapes in columns], dtype=float),
        blocking=blocking,
        windows=fitting,
        relays=np.array(relays, dtype=np.int64),
        gang_nodes=gang_nodes,
        gang_price=gang_nodes @ node_price,
        period=np.maximum(np.array([gang.period_s for gang in gangs], dtype=float), reward_s * (1 + ROUNDING)),
    )


def restore(view: View, counts: Counts, tau_s: float) -> Solution:
    """The plan by names. Replicas are laid out largest first: sizes divide one another, so none crosses a node."""
    gang = view.gangs[counts.gang]
    nodes, replicas = view.nodes(counts), np.array(counts.replicas)
    rented: dict[str, int] = {}
    placed: dict[str, int] = {}
    for k, names in enumerate(view.offers):
        of_class = sorted(np.flatnonzero(view.group == k), key=lambda j: -view.accelerators[j])
        if view.is_home[k]:
            placed |= {view.columns[j][0].name: int(replicas[j]) for j in of_class if replicas[j]}
            continue
        ends = np.cumsum([0, *(view.accelerators[j] * replicas[j] for j in of_class)])
        start, left = 0, int(nodes[k])
        for member, name in enumerate(names):
            num = min(left, view.problem.offers[name].num_nodes - gang.nodes.get(name, 0))
            left -= num
            if num:
                rented[name] = num
            end = start + num * int(view.per_node[k])
            for j, low, high in zip(of_class, ends, ends[1:], strict=False):
                count = max(0, min(end, high) - max(start, low)) // int(view.accelerators[j])
                if count:
                    shape = view.columns[j][member].name
                    placed[shape] = placed.get(shape, 0) + int(count)
            start = end
        assert left == 0, f"{left} nodes of {names} are promised that no one offers"
    return Solution(tau_s, gang.name, placed, rented)


def _check(problem: Problem) -> None:
    for kind, names in (
        ("rollout column", [column.name for column in problem.rollout]),
        ("gang", [gang.name for gang in problem.gangs]),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"two {kind}s are called {max(names, key=names.count)!r}")
    for name, offer in problem.offers.items():
        sizes = sorted({column.num_accelerators for column in problem.rollout if column.offer == name})
        for small, large in itertools.pairwise([*sizes, offer.per_node]):
            if large % small:
                raise ValueError(
                    f"{name}: {small} accelerators a replica do not divide {large}, so nodes would be torn"
                )


def _columns_of(problem: Problem, offer: str, *, is_home: bool = False) -> list[RolloutColumn]:
    """Of a class, those on rented nodes or those on the gang's own, which work only where training waits."""
    if is_home and problem.demand.bound:
        return []
    return [column for column in problem.rollout if column.offer == offer and column.is_home == is_home]


def _merged(
    problem: Problem, by_offer: dict[str, list[RolloutColumn]], roots: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    relays = relays_of(problem)
    for name, offer in sorted(problem.offers.items()):
        shapes = tuple(figures(column, roots) for column in by_offer[name])
        # Who passes versions on, or gets them over somebody, is like no one else.
        alone = name if name in relays or any(column.lag_over_s for column in by_offer[name]) else None
        alike[(offer.per_node, micros(offer.node_price_per_h), shapes, alone)].append(name)

    return tuple(tuple(names) for names in sorted(alike.values(), key=_order(problem, by_offer, roots)))


def _homes(
    problem: Problem, by_offer: dict[str, list[RolloutColumn]], roots: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Each alone: what a gang keeps on its cards may differ between classes that are otherwise alike."""
    having = [[name] for name in sorted(problem.offers) if by_offer[name]]
    return tuple(tuple(names) for names in sorted(having, key=_order(problem, by_offer, roots)))


def _order(
    problem: Problem, by_offer: dict[str, list[RolloutColumn]], roots: Sequence[str]
) -> Callable[[list[str]], tuple[object, ...]]:
    """By figures, never by names."""

    def order(names: list[str]) -> tuple[object, ...]:
        first: Offer = problem.offers[names[0]]
        shapes = [
            (*figures(column, ()), *sorted(figures(column, (root,)) for root in roots)) for column in by_offer[names[0]]
        ]
        return (first.node_price_per_h, first.per_node, sum(problem.offers[name].num_nodes for name in names), shapes)

    return order


def _gang_nodes(gangs: Sequence[Gang], merged: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> Ints:
    nodes = [
        [sum(gang.nodes.get(name, 0) for name in names) for names in merged]
        + [-gang.nodes.get(name, 0) for (name,) in own]
        for gang in gangs
    ]
    return np.array(nodes, dtype=np.int64).reshape(len(gangs), len(merged) + len(own))
