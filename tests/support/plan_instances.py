"""Problems that are small enough to be solved by counting, and the counting."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

from offbeat.planner.problem import Demand, Gang, Offer, PlanningProblem, RolloutColumn


def golden(**demand) -> PlanningProblem:
    """Two classes, answers by hand: see test_plan_search."""
    offers = {"A": Offer("A", 2, 4, 16.0), "B": Offer("B", 3, 4, 4.0)}
    blocking = {"A": 2.0, "B": 2.0}
    rollout = tuple(
        RolloutColumn(f"on {name}", name, 1, 1, 16, rate, 0.01, blocking)
        for name, rate in (("A", 1000.0), ("B", 400.0))
    )
    sizes = (("A", 1, 60.0), ("A", 2, 34.0), ("B", 2, 110.0), ("B", 3, 80.0))
    gangs = tuple(Gang(f"{name} x {num}", {name: num}, name, step_s, 0.0) for name, num, step_s in sizes)
    return PlanningProblem(offers, rollout, gangs, Demand(64, 120_000.0, **({"bound": 2} | demand)))


def at_home(problem: PlanningProblem, room_bytes: float = 0.0, **changes) -> PlanningProblem:
    """With each column also on the gang's own nodes."""
    home = [replace(one, name=f"{one.name} at home", room_bytes=room_bytes, **changes) for one in problem.rollout]
    return replace(problem, rollout=(*problem.rollout, *home))


def drawn(seed: int, num_classes: int = 2, max_nodes: int = 3) -> PlanningProblem:
    """At random: one or two shapes a class, gangs of one and of two classes, blocking by pair."""
    rng = random.Random(seed)
    names = [f"c{index}" for index in range(num_classes)]
    offers = {name: Offer(name, rng.randint(1, max_nodes), 2, float(rng.randint(1, 9))) for name in names}
    rollout = []
    for name in names:
        for size in rng.choice([(1,), (2,), (1, 2)]):
            blocking = {root: float(rng.randint(0, 6)) for root in names}
            rate = size * rng.uniform(50, 150)
            lag_s = {root: rng.choice([0.0, 0.0, 5.0, 30.0]) for root in names}
            num = rng.choice([4, 8, 12])
            rollout.append(RolloutColumn(f"{name} u{size}", name, size, size, num, rate, 0.01, blocking, lag_s=lag_s))
    gangs = []
    for name in names:
        num = rng.randint(1, 2)
        gangs.append(Gang(f"{name} x {num}", {name: num}, name, rng.uniform(5, 40), rng.choice([0.0, 1.0])))
    if num_classes > 1:
        gangs.append(Gang("both", {names[0]: 1, names[1]: 1}, names[0], rng.uniform(4, 30), 0.0))
    demand = Demand(
        16,
        5_000.0,
        rng.choice([0, 1, 2, 3]),
        tail_tokens=rng.choice([0.0, 1_000.0]),
        reward_rate=rng.choice([None, 2.0]),
    )
    problem = PlanningProblem(offers, tuple(rollout), tuple(gangs), demand)
    if seed % 2:
        problem = _passed_on(problem, random.Random(-seed))
    return problem if rng.random() < 0.5 else _shared(problem, rng)


def _passed_on(problem: PlanningProblem, rng: random.Random) -> PlanningProblem:
    """Versions that come late come sooner over other classes that generate."""

    def over_s(column: RolloutColumn) -> dict[str, dict[str, float]]:
        others = [name for name in problem.offers if name != column.offer]
        late = [root for root, seconds in column.lag_s.items() if seconds]
        return {root: {name: rng.choice([0.0, 2.0]) for name in others if rng.random() < 0.8} for root in late}

    by_class = {}
    for column in problem.rollout:
        by_class.setdefault(column.offer, over_s(column))
    return replace(
        problem, rollout=tuple(replace(column, lag_over_s=by_class[column.offer]) for column in problem.rollout)
    )


def _shared(problem: PlanningProblem, rng: random.Random) -> PlanningProblem:
    """Also on the gang's own nodes, where memory allows: in fewer shapes, each with its own time lost."""
    home = [
        replace(
            one,
            name=f"{one.name} at home",
            blocking_s={root: lost + rng.choice([0.0, 3.0]) for root, lost in one.blocking_s.items()},
            lag_s={},
            room_bytes=float(rng.randint(2, 8)),
        )
        for one in problem.rollout
        if rng.random() < 0.8
    ]
    gangs = [replace(g, kept_bytes={name: float(rng.randint(1, 6)) for name in g.nodes}) for g in problem.gangs]
    lean = [replace(gangs[0], name=f"{gangs[0].name} lean", step_s=gangs[0].step_s * 1.3, kept_bytes={})]
    return replace(problem, rollout=(*problem.rollout, *home), gangs=(*gangs, *lean))


def plans(problem: PlanningProblem):
    """Every gang with every choice of replicas that fits nodes: (gang, counts by column, price)."""
    for gang in problem.gangs:
        free = {(name, False): offer.num_nodes - gang.nodes.get(name, 0) for name, offer in problem.offers.items()}
        if min(free.values()) < 0:
            continue
        free |= {(name, True): 0 if problem.demand.bound else gang.nodes.get(name, 0) for name in problem.offers}
        most = []
        for column in problem.rollout:
            has_room = column.room_bytes is None or gang.kept_bytes.get(column.offer, 0.0) <= column.room_bytes
            cards = free[column.offer, column.is_home] * problem.offers[column.offer].per_node
            most.append(cards // column.num_accelerators if has_room else 0)
        for counts in itertools.product(*(range(num + 1) for num in most)):
            used = dict.fromkeys(free, 0)
            for column, num in zip(problem.rollout, counts, strict=True):
                used[column.offer, column.is_home] += num * column.num_accelerators
            nodes = {place: -(-num // problem.offers[place[0]].per_node) for place, num in used.items()}
            if all(nodes[place] <= free[place] for place in nodes):
                total = {name: nodes[name, False] + gang.nodes.get(name, 0) for name in problem.offers}
                yield gang, counts, sum(num * problem.offers[name].node_price_per_h for name, num in total.items())


def is_plan(problem: PlanningProblem, gang: Gang, counts, tau_s: float) -> bool:
    demand, tau = problem.demand, Fraction(tau_s)
    cap = demand.bound * demand.trajectories - demand.queue if demand.bound else demand.trajectories
    if gang.period_s > tau_s or sum(n * c.concurrency for c, n in zip(problem.rollout, counts, strict=True)) > cap:
        return False
    if demand.reward_rate and demand.trajectories > demand.reward_rate * tau:
        return False
    yields = []
    for column, num in zip(problem.rollout, counts, strict=True):
        left = tau - Fraction(column.blocking_s[gang.root])
        ways_s = [column.lag_s.get(gang.root, 0)]
        if demand.bound:
            present = {*gang.nodes, *(c.offer for c, n in zip(problem.rollout, counts, strict=True) if n)}
            ways_s += [way_s for name, way_s in column.lag_over_s.get(gang.root, {}).items() if name in present]
        lag = Fraction(demand.lag_s) + Fraction(min(ways_s))
        left -= 0 if demand.bound else Fraction(gang.period_s) + lag
        window = (demand.bound + 1 - Fraction(demand.age_guard)) * tau - Fraction(gang.period_s) - lag
        window = window if demand.bound else left
        if num and demand.tail_tokens and Fraction(demand.tail_tokens) * Fraction(column.token_s) > window:
            return False
        yields += [Fraction(column.tokens_per_s) * max(left, 0)] * num
    return sum(yields) >= demand.tokens


def least_price(problem: PlanningProblem, tau_s: float) -> float | None:
    """By counting."""
    return min((price for gang, counts, price in plans(problem) if is_plan(problem, gang, counts, tau_s)), default=None)
