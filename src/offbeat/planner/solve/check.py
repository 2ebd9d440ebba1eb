"""Checks a plan and its certificate without a solver, in exact arithmetic.

The checker shares no code with the integer program or its bounds: numbers are fractions, counts are integers, and money
is in whole millionths of a dollar. The dual prices of a certificate must rule out every training gang, except those
that the certificate lists as ruled out by the solver alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np

from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution
from offbeat.planner.solve.bounds import Multipliers
from offbeat.planner.solve.certificate import Certificate

Used = list[tuple[RolloutColumn, int]]
"""Columns (replica shapes) of a plan, each with its number of replicas."""


def check(
    problem: PlanningProblem, solution: Solution, certificate: Certificate | None = None, budget: float | None = None
) -> list[str]:
    """Checks a solution and its proof, if given: returns one line per violated constraint; an empty list if all hold.
    `budget` is in $/h (None: no limit)."""
    columns = {column.name: column for column in problem.rollout}
    gangs = {gang.name: gang for gang in problem.gangs}
    unknown = [
        f"names: the input files give no {kind} called {name!r}"
        for kind, names, known in (
            ("gang", [solution.gang], gangs),
            ("rollout column", solution.replicas, columns),
            ("offer", solution.nodes, problem.offers),
        )
        for name in names
        if name not in known
    ]
    counts = [*solution.replicas.values(), *solution.nodes.values()]
    most = sum(offer.num_nodes * offer.per_node for offer in problem.offers.values())
    if unknown or any(type(count) is not int or not 0 <= count <= most for count in counts):
        return unknown or [f"counts: numbers of replicas and nodes must be whole numbers, 0 to {most} cards on offer"]
    if not solution.tau_s > 0:
        return [f"period: a step every {solution.tau_s:g} s is impossible"]
    gang, tau = gangs[solution.gang], Fraction(solution.tau_s)
    used = [(columns[name], count) for name, count in solution.replicas.items() if count]
    broken = [
        *_gang_row(problem, gang, tau),
        *_token_row(problem, gang, tau, used),
        *_hardware_rows(problem, gang, solution, used),
        *_memory_rows(gang, used),
        *_in_flight_row(problem, used),
        *_age_rows(problem, gang, tau, used),
        *_budget_row(problem, gang, solution, budget),
    ]
    return broken if certificate is None else broken + _certificate_rows(problem, solution, certificate)


def _gang_row(problem: PlanningProblem, gang: Gang, tau: Fraction) -> list[str]:
    demand, broken = problem.demand, []
    if Fraction(gang.period_s) > tau:
        broken.append(f"gang: {gang.name} takes {gang.period_s:g} s a step, more than the period of {float(tau):g} s")
    if demand.reward_rate is not None and demand.trajectories > Fraction(demand.reward_rate) * tau:
        rate = f"{demand.reward_rate:g} trajectories/s"
        wanted = f"{demand.trajectories} trajectories in a period of {float(tau):g} s"
        broken.append(f"reward: the reward pool scores {rate}, too few for {wanted}")
    return broken


def _lost_s(problem: PlanningProblem, gang: Gang, column: RolloutColumn) -> Fraction:
    lost = Fraction(column.blocking_s[gang.root])
    return lost if problem.demand.bound else lost + Fraction(gang.period_s) + _lag(problem, gang, column)


def _lag(problem: PlanningProblem, gang: Gang, column: RolloutColumn, classes: Iterable[str] = ()) -> Fraction:
    """Returns the seconds until the column's node class has a new version, directly or relayed by the best of
    `classes`, plus the seconds to compute a reward."""
    ways_s = [column.lag_s.get(gang.root, 0.0)]
    if problem.demand.bound:
        over_s = column.lag_over_s.get(gang.root, {})
        ways_s += [over_s[name] for name in classes if name in over_s]
    return Fraction(problem.demand.lag_s) + Fraction(min(ways_s))


def _tokens(problem: PlanningProblem, gang: Gang, tau: Fraction, column: RolloutColumn) -> Fraction:
    return Fraction(column.tokens_per_s) * max(tau - _lost_s(problem, gang, column), Fraction(0))


def _token_row(problem: PlanningProblem, gang: Gang, tau: Fraction, used: Used) -> list[str]:
    total = sum((_tokens(problem, gang, tau, column) * count for column, count in used), Fraction(0))
    wanted = Fraction(problem.demand.tokens)
    return (
        []
        if total >= wanted
        else [f"tokens: the replicas generate {float(total):g} per period, but {float(wanted):g} are needed"]
    )


def _hardware_rows(problem: PlanningProblem, gang: Gang, solution: Solution, used: Used) -> list[str]:
    broken = []
    for name, offer in problem.offers.items():
        rented, trained = solution.nodes.get(name, 0), gang.nodes.get(name, 0)
        if rented + trained > offer.num_nodes:
            broken.append(f"hardware: {rented + trained} nodes of {name} are used, but {offer.num_nodes} are on offer")
        if offer.most_generating is not None and rented > offer.most_generating:
            broken.append(f"hardware: {rented} nodes of {name} generate, but only {offer.most_generating} may")
        if rented < offer.least_generating:
            broken.append(f"hardware: {rented} nodes of {name} generate, but {offer.least_generating} must")
        rooms = [offer.per_node] * rented
        home = gang.num_home_cards(offer, problem.demand.bound)
        whole, rest = divmod(home, offer.per_node)
        homes = [offer.per_node] * whole + ([rest] if rest else [])
        for is_home, room in ((False, rooms), (True, homes)):
            sizes = [
                size
                for column, count in used
                if column.offer == name and (column.room_bytes is not None) == is_home
                for size in [column.num_accelerators] * count
            ]
            if not _fits(sorted(sizes, reverse=True), room):
                nodes = f"{len(room)} nodes of {name}{' that train' if is_home else ''}"
                broken.append(f"hardware: replicas with {sum(sizes)} accelerators in all do not fit on {nodes}")
    return broken


def _memory_rows(gang: Gang, used: Used) -> list[str]:
    """Returns a line for each replica shape whose cards have too little memory left for the gang's training state."""
    return [
        f"memory: {column.name} leaves {column.room_bytes / 1e9:g} GB of each card free, but the gang's training state "
        f"needs {kept / 1e9:g} GB there"
        for column, _ in used
        if column.room_bytes is not None and (kept := gang.kept_bytes.get(column.offer, 0.0)) > column.room_bytes
    ]


def _fits(sizes: list[int], room: list[int]) -> bool:
    """Whether replicas fit into nodes: `sizes` are the cards of each replica, largest first, and `room` the free cards
    of each node. Fills one node after another, which leaves no gaps if the sizes divide one another."""
    node = 0
    for size in sizes:
        while node < len(room) and room[node] < size:
            node += 1
        if node == len(room):
            return False
        room[node] -= size
    return True


def _in_flight_row(problem: PlanningProblem, used: Used) -> list[str]:
    demand = problem.demand
    under_way = sum(column.concurrency * count for column, count in used)
    cap = Fraction(max(demand.bound, 1) * demand.trajectories)
    waiting = Fraction(demand.queue) if demand.bound else Fraction(0)
    if under_way + waiting <= cap:
        return []
    return [
        f"in flight: {under_way} trajectories, and {float(waiting):g} wait for training, but only {float(cap):g} are "
        "allowed in all"
    ]


def _age_rows(problem: PlanningProblem, gang: Gang, tau: Fraction, used: Used) -> list[str]:
    demand, broken = problem.demand, []
    classes = {*gang.nodes, *(column.offer for column, _ in used)}
    for column, _ in used if demand.tail_tokens else []:
        window = (demand.bound + 1 - Fraction(demand.age_guard)) * tau - Fraction(gang.period_s)
        window -= _lag(problem, gang, column, classes)
        if not demand.bound:
            window = tau - _lost_s(problem, gang, column)
        tail = Fraction(demand.tail_tokens) * Fraction(column.token_s)
        if tail > window:
            takes = f"takes {float(tail):g} s for an answer of {demand.tail_tokens:g} tokens"
            broken.append(f"age window: {column.name} {takes}, but only {float(window):g} s are allowed for it")
    return broken


def _budget_row(problem: PlanningProblem, gang: Gang, solution: Solution, budget: float | None) -> list[str]:
    nodes = Counter(solution.nodes) + Counter(gang.nodes)
    price = sum(_money(problem.offers[name].node_price_per_h) * num for name, num in nodes.items())
    price += _money(problem.fixed_price_per_h)
    if budget is None or price <= _money(budget):
        return []
    return [f"budget: the plan costs {price / 1e6:g} $/h, more than {budget:g} $/h"]


def _money(price: float) -> int:
    return round(price * 1_000_000)


def _certificate_rows(problem: PlanningProblem, solution: Solution, certificate: Certificate) -> list[str]:
    broken = []
    found = hashlib.sha256(json.dumps(asdict(problem), sort_keys=True).encode()).hexdigest()
    if found != certificate.columns_sha256:
        broken.append(
            "certificate: it is for another problem; if the cluster, workload or constants were changed, plan again"
        )
    if certificate.tau_lo_s > solution.tau_s:
        claims = f"it claims that no period is below {certificate.tau_lo_s:g} s"
        broken.append(f"certificate: {claims}, but the plan's is {solution.tau_s:g} s")
    if certificate.price_cap is None and solution.tau_s > certificate.tau_lo_s * (1 + certificate.gap) * (1 + 1e-9):
        period = f"the plan's period of {solution.tau_s:g} s"
        broken.append(f"certificate: {period} is above the bound of {certificate.tau_lo_s:g} s by more than the gap")
    if certificate.tau_lo_s <= 0:
        broken.append(f"certificate: a bound of {certificate.tau_lo_s:g} s says nothing")
    if broken or certificate.branches:
        return broken  # `verifying` checks branches, whose lags follow from the machines
    left = unproven(problem, certificate) - {*certificate.by_solver}
    return [f"certificate: its proof does not rule out a better plan with gang {name}" for name in left]


def unproven(problem: PlanningProblem, certificate: Certificate) -> set[str]:
    """Names of the gangs that the certificate's dual prices do not rule out by arithmetic alone."""
    tau = Fraction(certificate.tau_lo_s)
    reward_rate = problem.demand.reward_rate
    if reward_rate is not None and problem.demand.trajectories > Fraction(reward_rate) * tau:
        return set()
    open_gangs = [
        gang
        for gang in problem.gangs
        if Fraction(gang.period_s) <= tau
        and all(name in problem.offers and num <= problem.offers[name].num_nodes for name, num in gang.nodes.items())
    ]
    floats = _Floats.of(problem, open_gangs)
    for prices in certificate.prices:
        nu, lam, mu = Fraction(prices.nu), Fraction(prices.lam), Fraction(prices.mu)
        if min(nu, lam, mu) < 0 or (mu and certificate.price_cap is None):
            continue  # negative prices, or a price of money without a price cap, prove nothing
        ladders: dict[str, _Ladders] = {}
        for gang in floats.perhaps_ruled_out(certificate, prices):
            if not problem.demand.bound:
                known = _best_in_turn(problem, gang, tau, nu, lam, floats.by_worth(gang, certificate.tau_lo_s, prices))
            else:
                if gang.root not in ladders:
                    ladders[gang.root] = _ladders(problem, gang, tau, nu, lam)
                known = ladders[gang.root]
            worths = _worths(problem, gang, tau, known)
            supply = _supply(problem, gang, certificate.price_cap, worths, lam, mu)
            if nu * Fraction(problem.demand.tokens) > supply:
                floats.gangs.remove(gang)
    return {gang.name for gang in floats.gangs}


_Place = tuple[str, bool]
"""Name of a class of nodes, and True for its nodes that train (home) or False for nodes rented for rollout."""
_Worths = dict[_Place, Fraction]
_Ladders = dict[_Place, tuple[list[Fraction], list[Fraction]]]
"""For each place, two lists. The first holds the seconds that columns (replica shapes) need for a long answer,
ascending. The second holds, for each of these times, the highest worth of an accelerator among the columns that need at
most this time."""


ROUNDING = 1e-9
"""Relative rounding error of floats, with much room."""


@dataclass(frozen=True)
class _Floats:
    """The problem in floats, which tell what has to be computed exactly: of thousands of pairs of a gang and dual
    prices only those that seem to prove something, and of thousands of columns only the most valuable."""

    problem: PlanningProblem
    gangs: list[Gang]
    """Gangs that are not ruled out yet."""
    places: dict[_Place, np.ndarray]
    """Indices of the columns of each place."""
    rate: np.ndarray
    cards: np.ndarray
    in_flight: np.ndarray
    tail_s: np.ndarray
    """Seconds that a long answer takes in each column."""
    room: np.ndarray
    lost_s: dict[str, np.ndarray]
    """Seconds of a period in which a column does not generate, by the class that publishes; with staleness bound 0
    including the time until it has a version, but not training."""
    lag_s: dict[str, np.ndarray]
    """Seconds until a column has a version at best, by the class that publishes."""

    @classmethod
    def of(cls, problem: PlanningProblem, gangs: list[Gang]) -> _Floats:
        columns, demand = problem.rollout, problem.demand
        places: dict[_Place, list[int]] = {}
        for i, column in enumerate(columns):
            places.setdefault((column.offer, column.room_bytes is not None), []).append(i)
        roots = {gang.root for gang in gangs}
        over = problem.offers if demand.bound else ()
        lag_s = {root: np.array([demand.lag_s + one.lag_from_s(root, over) for one in columns]) for root in roots}
        waits = {root: 0.0 if demand.bound else lag_s[root] for root in roots}
        return cls(
            problem,
            list(gangs),
            {place: np.array(of_place) for place, of_place in places.items()},
            np.array([one.tokens_per_s for one in columns]),
            np.array([one.num_accelerators for one in columns]),
            np.array([one.concurrency for one in columns]),
            np.array([demand.tail_tokens * one.token_s for one in columns]),
            np.array([math.inf if one.room_bytes is None else one.room_bytes for one in columns]),
            {root: np.array([one.blocking_s[root] for one in columns]) + waits[root] for root in roots},
            lag_s,
        )

    def values(self, gang: Gang, tau_s: float, prices: Multipliers) -> np.ndarray:
        """Worth of an accelerator in each column; minus infinity where its long answers are certainly too late."""
        bound = self.problem.demand.bound
        lost_s = self.lost_s[gang.root] + (0.0 if bound else gang.period_s)
        values = prices.nu * self.rate * np.maximum(tau_s - lost_s, 0.0) - prices.lam * self.in_flight
        window_s = (bound + 1 - self.problem.demand.age_guard) * tau_s - gang.period_s - self.lag_s[gang.root]
        late = self.tail_s > (window_s if bound else tau_s - lost_s) + ROUNDING * tau_s
        return np.where(late & (self.tail_s > 0), -np.inf, values / self.cards)

    def perhaps_ruled_out(self, certificate: Certificate, prices: Multipliers) -> list[Gang]:
        """Returns the gangs that these dual prices rule out, up to rounding."""
        found, problem = [], self.problem
        for gang in self.gangs:
            values = self.values(gang, certificate.tau_lo_s, prices)
            worths = {(name, is_home): Fraction(0) for name in problem.offers for is_home in (False, True)}
            for place, among in self.places.items():
                kept = gang.kept_bytes.get(place[0], 0.0)
                best = float(values[among][self.room[among] >= kept].max(initial=0.0))
                worths[place] = Fraction(max(best, 0.0))
            mu, lam = Fraction(prices.mu), Fraction(prices.lam)
            supply = float(_supply(problem, gang, certificate.price_cap, worths, lam, mu))
            demand = prices.nu * problem.demand.tokens
            if demand > supply - ROUNDING * (abs(demand) + abs(supply)):
                found.append(gang)
        return found

    def by_worth(self, gang: Gang, tau_s: float, prices: Multipliers) -> _Among:
        """Returns the columns of each place, the most valuable first, with their values."""
        values = self.values(gang, tau_s, prices)
        return {
            place: [(float(values[i]), self.problem.rollout[i]) for i in among[np.argsort(-values[among])]]
            for place, among in self.places.items()
        }


_Among = dict[_Place, list[tuple[float, RolloutColumn]]]


def _best_in_turn(
    problem: PlanningProblem, gang: Gang, tau: Fraction, nu: Fraction, lam: Fraction, among: _Among
) -> _Ladders:
    """Returns the highest worth of an accelerator of each place with staleness bound 0. Columns are tried from the most
    valuable on, as floats say, until all that are left are worth less by more than rounding."""
    best: _Ladders = {}
    for place, found in among.items():
        most: Fraction | None = None
        size = max((abs(value) for value, _ in found if math.isfinite(value)), default=0.0)
        for value, column in found:
            if math.isinf(value) or (most is not None and value < float(most) - ROUNDING * size):
                break
            if _age_rows(problem, gang, tau, [(column, 1)]) or _memory_rows(gang, [(column, 1)]):
                continue
            exact = (nu * _tokens(problem, gang, tau, column) - lam * column.concurrency) / column.num_accelerators
            most = exact if most is None else max(most, exact)
        if most is not None:
            best[place] = [Fraction(0)], [most]
    return best


def _ladders(problem: PlanningProblem, gang: Gang, tau: Fraction, nu: Fraction, lam: Fraction) -> _Ladders:
    """Returns the highest worth of an accelerator of each place, by the time allowed for a long answer. `nu` is the
    price of a token, `lam` the price of a trajectory in flight. For a staleness bound above 0, with which the result is
    the same for all gangs with the same publishing class."""
    values: dict[_Place, list[tuple[Fraction, Fraction]]] = {}
    for column in problem.rollout:
        needed = Fraction(problem.demand.tail_tokens) * Fraction(column.token_s)
        needed += _lag(problem, gang, column, problem.offers)
        value = (nu * _tokens(problem, gang, tau, column) - lam * column.concurrency) / column.num_accelerators
        values.setdefault((column.offer, column.room_bytes is not None), []).append((needed, value))
    ladders: _Ladders = {}
    for place, found in values.items():
        found.sort()
        ladders[place] = [needed for needed, _ in found], [*accumulate((value for _, value in found), max)]
    return ladders


def _worths(problem: PlanningProblem, gang: Gang, tau: Fraction, ladders: _Ladders) -> _Worths:
    """Returns the highest worth of an accelerator of each place (a class of nodes, and whether they train). Only
    replica shapes that finish a long answer in time with this gang count."""
    demand = problem.demand
    left = (demand.bound + 1 - Fraction(demand.age_guard)) * tau - Fraction(gang.period_s)
    best = {(name, is_home): Fraction(0) for name in problem.offers for is_home in (False, True)}
    for place, (needed, values) in ladders.items():
        num = bisect_right(needed, left) if demand.bound and demand.tail_tokens else len(needed)
        if num:
            best[place] = max(best[place], values[num - 1])
    return best


def _supply(
    problem: PlanningProblem, gang: Gang, price_cap: int | None, worths: _Worths, lam: Fraction, mu: Fraction
) -> Fraction:
    """Returns an upper bound on the worth, at the dual prices `lam` and `mu`, of the tokens that any plan with this
    gang generates. If the demanded tokens are worth more, the gang is ruled out."""
    demand = problem.demand
    cap = demand.bound * demand.trajectories - Fraction(demand.queue) if demand.bound else Fraction(demand.trajectories)
    supply = lam * cap
    if price_cap is not None:
        price = sum(_money(problem.offers[name].node_price_per_h) * num for name, num in gang.nodes.items())
        supply += mu * (price_cap - _money(problem.fixed_price_per_h) - price)
    for name, offer in problem.offers.items():
        node, trained = worths[name, False] * offer.per_node, gang.nodes.get(name, 0)
        supply += offer.num_free(trained) * max(node - mu * _money(offer.node_price_per_h), Fraction(0))
        supply += gang.num_home_cards(offer, demand.bound) * worths[name, True]
    return supply
