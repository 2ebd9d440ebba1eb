"""Which nodes of each class train and which roll out.

Duty: from counts per class to names, where nodes of a class differ. The caller says what a choice costs, by whatever it
will really take; surrogates are not used. Where nodes are alike any choice is best. Where there are few choices all are
tried. Otherwise: a bisection of each class that cuts little bandwidth (Kernighan-Lin), then passes of exchanges within
a class, in which every node moves once and the best moment of a pass is kept (Fiduccia-Mattheyses), until none helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import networkx as nx

from offbeat.plan.place.nodes import Fabric

Score = TypeVar("Score", float, tuple[float, ...])
Cost = Callable[[frozenset[str], frozenset[str]], Score]
"""Of the training nodes and the rollout nodes."""
MAX_TRIED = 300
MAX_REFINED = 3_000
"""Choices that exchanges may look at: of many nodes a pass alone has thousands."""
SEED = 0


def split(
    fabric: Fabric, training: Mapping[str, int], rollout: Mapping[str, int], cost: Cost[Score]
) -> tuple[frozenset[str], frozenset[str]]:
    """So many nodes of each class for each side, as cheap as can be found; the others stay idle."""
    members: dict[str, list[str]] = {}
    for name, node in fabric.nodes.items():
        members.setdefault(node.offer, []).append(name)
    if fabric.is_alike:
        return _sides(_in_order(members, training, rollout))
    if _num_choices(members, training, rollout) <= MAX_TRIED:
        return min((_sides(side_of) for side_of in _choices(members, training, rollout)), key=lambda pair: cost(*pair))
    starts = [_bisected(fabric, members, training, rollout), _well_linked(fabric, members, training, rollout)]
    return _sides(_refined(min(starts, key=lambda side_of: cost(*_sides(side_of))), members, cost))


def _in_order(
    members: Mapping[str, list[str]], training: Mapping[str, int], rollout: Mapping[str, int]
) -> dict[str, str]:
    """The first nodes of a class train, the next roll out."""
    side_of: dict[str, str] = {}
    for offer, names in members.items():
        first, then = training.get(offer, 0), rollout.get(offer, 0)
        assert first + then <= len(names), f"{first} + {then} of {len(names)} nodes of {offer}"
        side_of |= dict(zip(names, ["train"] * first + ["roll"] * then + ["idle"] * len(names), strict=False))
    return side_of


def _sides(side_of: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    training, rollout = ([name for name, at in side_of.items() if at == side] for side in ("train", "roll"))
    return frozenset(training), frozenset(rollout)


def _num_choices(members: Mapping[str, list[str]], training: Mapping[str, int], rollout: Mapping[str, int]) -> int:
    counts = [(len(names), training.get(offer, 0), rollout.get(offer, 0)) for offer, names in members.items()]
    return math.prod(math.comb(n, t) * math.comb(n - t, r) for n, t, r in counts)


def _choices(
    members: Mapping[str, list[str]], training: Mapping[str, int], rollout: Mapping[str, int]
) -> Iterator[dict[str, str]]:
    def of_class(offer: str, names: list[str]) -> list[dict[str, str]]:
        found = []
        for trains in itertools.combinations(names, training.get(offer, 0)):
            left = [name for name in names if name not in trains]
            for rolls in itertools.combinations(left, rollout.get(offer, 0)):
                found.append(
                    dict.fromkeys(names, "idle") | dict.fromkeys(trains, "train") | dict.fromkeys(rolls, "roll")
                )
        return found

    for parts in itertools.product(*(of_class(offer, names) for offer, names in members.items())):
        yield {name: side for part in parts for name, side in part.items()}


def _bisected(
    fabric: Fabric, members: Mapping[str, list[str]], training: Mapping[str, int], rollout: Mapping[str, int]
) -> dict[str, str]:
    """Of each class, training nodes that have little bandwidth to the others."""
    ordered = {}
    for offer, names in members.items():
        first = training.get(offer, 0)
        if 0 < first < len(names):
            halves = (set(names[:first]), set(names[first:]))
            trains, others = nx.community.kernighan_lin_bisection(fabric.graph(names), halves, seed=SEED)
            names = sorted(trains) + sorted(others) if len(trains) == first else sorted(others) + sorted(trains)
        ordered[offer] = names
    return _in_order(ordered, training, rollout)


def _well_linked(
    fabric: Fabric, members: Mapping[str, list[str]], training: Mapping[str, int], rollout: Mapping[str, int]
) -> dict[str, str]:
    """Of each class, the nodes whose measured links are the best train, and the worst stay idle."""
    rates: dict[str, list[float]] = {}
    for pair, rate in fabric.measured.items():
        for name in pair:
            usual = fabric.inventory.link(*(fabric.nodes[one].offer for one in sorted(pair))).bytes_per_s
            rates.setdefault(name, []).append(math.log(rate / usual))
    ordered = {offer: sorted(names, key=lambda name: -sum(rates.get(name, []))) for offer, names in members.items()}
    return _in_order(ordered, training, rollout)


def _refined(side_of: dict[str, str], members: Mapping[str, list[str]], cost: Cost[Score]) -> dict[str, str]:
    best, best_cost, num_left = side_of, cost(*_sides(side_of)), MAX_REFINED
    while True:
        now, free, trail = best, set(best), []
        while swaps := [(one, other) for names in members.values() for one, other in itertools.combinations(names, 2)
                        if one in free and other in free and now[one] != now[other]][:num_left]:  # fmt: skip
            num_left -= len(swaps)
            trials = [({**now, one: now[other], other: now[one]}, one, other) for one, other in swaps]
            costs = [cost(*_sides(trial)) for trial, _, _ in trials]
            now, one, other = trials[costs.index(min(costs))]
            free -= {one, other}
            trail.append((min(costs), now))
        if not trail or min(trail, key=lambda step: step[0])[0] >= best_cost:
            return best
        best_cost, best = min(trail, key=lambda step: step[0])
