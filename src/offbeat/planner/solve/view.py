"""A planning problem as arrays for the solvers, without columns and gangs that others beat, and with equal classes
merged.

A gang is a candidate group of training nodes, a rollout column a replica shape, and a class a kind of identical nodes.
Arrays are indexed by these, in an order that depends on numbers, never on names. Merging and dropping do not change the
best period or price; `restore` leads back to names. Money is counted in whole millionths of a dollar, so that sums are
exact. Replicas on the gang's own nodes are columns of a *home* class, whose nodes are single cards. Such a class offers
no nodes: each gang brings its own cards at no cost, which is written as taking a negative number of home nodes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ByOffer = dict[str, list[RolloutColumn]]
Source = tuple[str, frozenset[str]]
"""Source of a gang's versions: the class that publishes, and the gang's own classes that may relay."""


def relays_of(problem: PlanningProblem) -> frozenset[str]:
    """Names of the classes that may relay versions; empty with staleness bound 0."""
    return _relays(problem.rollout if problem.demand.bound else ())


def _relays(columns: Iterable[RolloutColumn]) -> frozenset[str]:
    return frozenset(name for column in columns for ways_s in column.lag_over_s.values() for name in ways_s)


def source_of(gang: Gang, relays: frozenset[str]) -> Source:
    return gang.root, frozenset(gang.nodes) & relays


@dataclass(frozen=True)
class Lags:
    """Delays in seconds from a version's publication until each rollout column (replica shape) of a list has it."""

    direct_s: dict[str, Floats]
    """One lag per column in seconds, without a relay, by the class that publishes."""
    over_s: dict[tuple[str, str], Floats]
    """One lag per column, by publishing and relaying class; infinite if the relay does not help the column."""

    def of(self, root: str, over: Iterable[str] = ()) -> Floats:
        """Seconds until each column has a version that the class `root` publishes, directly or relayed by the best
        class of `over`."""
        ways_s = [self.over_s[root, name] for name in over if (root, name) in self.over_s]
        return np.minimum.reduce([self.direct_s[root], *ways_s])

    def every(self, source: Source, relays: Iterable[str]) -> Floats:
        """Returns an array of (1 + relays) x columns: lags in seconds. In the first row only the gang's own classes
        relay versions; in each further row one class of `relays` does too."""
        root, own = source
        return np.array([self.of(root, over) for over in (own, *(own | {name} for name in relays))])


def lags_of(columns: Sequence[RolloutColumn], roots: Iterable[str]) -> Lags:
    # All columns of a place share their lags, so each of these is looked up once and copied to its columns.
    known: dict[tuple[int, int], int] = {}
    of_column = [known.setdefault((id(one.lag_s), id(one.lag_over_s)), len(known)) for one in columns]
    first = [columns[of_column.index(i)] for i in range(len(known))]
    relays = _relays(first)
    direct_s, over_s = {}, {}

    def each(values: list[float]) -> Floats:
        return np.array(values, dtype=float)[np.array(of_column, dtype=np.int64)]

    for root in roots:
        direct_s[root] = each([column.lag_from_s(root) for column in first])
        ways_s = [column.lag_over_s.get(root, {}) for column in first]
        for name in relays:
            over_s[root, name] = each([ways.get(name, np.inf) for ways in ways_s])
    return Lags(direct_s, over_s)


def figures(column: RolloutColumn, roots: Sequence[str]) -> tuple[float, ...]:
    """All numbers of a column (replica shape) that can influence a plan; `roots` are the publishing classes."""
    found = [column.num_accelerators, column.concurrency, column.tokens_per_s, column.token_s]
    found += [] if column.room_bytes is None else [column.room_bytes]
    for root in roots:
        found += [column.blocking_s[root], column.lag_from_s(root)]
        found += sorted(column.lag_over_s.get(root, {}).values())
    return tuple(found)


def efficient(columns: list[RolloutColumn], roots: Sequence[str]) -> list[RolloutColumn]:
    """Returns the columns (replica shapes) that no other column beats, sorted by their numbers, then by name. A column
    beats another if it is as good in every respect (tokens per accelerator, delays, memory). Its number of cards must
    also divide the other's number, so that its replicas fit on the same cards."""
    keyed = sorted(((figures(column, roots), column.name, column) for column in columns), key=lambda each: each[:2])
    columns = [
        column
        for i, (key, _, column) in enumerate(keyed)
        if not (i and key == keyed[i - 1][0] and column.lag_over_s == keyed[i - 1][2].lag_over_s)
    ]
    if not columns:
        return columns
    size = np.array([column.num_accelerators for column in columns])
    each = np.array([(column.concurrency, -column.tokens_per_s) for column in columns]) / size[:, None]
    own = np.array([(one.token_s, -(one.room_bytes or 0.0)) for one in columns])
    blocking = np.array([[one.blocking_s[root] for one in columns] for root in roots])
    lags = lags_of(columns, roots)
    worse = [*each.T, *own.T, *blocking, *lags.direct_s.values(), *lags.over_s.values()]
    beats = size[None, :] % size[:, None] == 0
    for figure in worse:
        beats &= figure[:, None] <= figure[None, :]
    order = np.arange(len(columns))
    beats &= ~beats.T | (order[:, None] < order[None, :])  # of two equal columns the first stays
    np.fill_diagonal(beats, False)
    return [column for column, is_beaten in zip(columns, beats.any(axis=0), strict=True) if not is_beaten]


def efficient_gangs(
    problem: PlanningProblem,
    nodes_of: Callable[[Sequence[Gang]], Ints],
    own: Sequence[Sequence[str]],
    columns: Sequence[Sequence[RolloutColumn]],
) -> tuple[tuple[Gang, ...], dict[str, str]]:
    """Returns the training gangs that fit the offered nodes and that no other gang beats. Also returns, for each beaten
    gang, the name of a gang that beats it. A gang beats another if it is as good in nodes, period, delays of versions
    and memory kept for training state. It must also have as many home nodes (own nodes shared with replicas), or more.

    `nodes_of` returns an array of gangs x classes. `own` holds the home classes, each as a tuple of one name. `columns`
    holds the equal replica shapes of each rollout column."""
    offered = {name: offer.num_nodes for name, offer in problem.offers.items()}
    fitting = [gang for gang in problem.gangs if all(num <= offered.get(name, 0) for name, num in gang.nodes.items())]
    relays = relays_of(problem)
    sources = [source_of(gang, relays) for gang in fitting]
    lost = _lost([one for one, *_ in columns], set(sources), relays)
    nodes = nodes_of(fitting)
    kept_bytes = [[gang.kept_bytes.get(name, 0.0) for (name,) in own] for gang in fitting]
    costs = np.hstack([nodes, np.array(kept_bytes).reshape(len(fitting), len(own))])
    figures = {source: tuple(sorted(lost[source])) for source in lost}
    rank = {source: sorted(set(figures.values())).index(figures[source]) for source in lost}  # never by name
    rows = costs.tolist()
    keys = [(gang.period_s, *row, rank[source]) for gang, row, source in zip(fitting, rows, sources, strict=True)]
    # Whether the first source of a pair loses no more time at any column than the second.
    as_good = {(one, other): bool((lost[one] <= lost[other]).all()) for one in lost for other in lost}
    kept: list[int] = []
    kept_costs = np.empty_like(costs)
    beaten: dict[str, str] = {}
    for s in sorted(range(len(fitting)), key=lambda s: (*keys[s], fitting[s].name)):
        rivals = np.flatnonzero((kept_costs[: len(kept)] <= costs[s]).all(axis=1))  # no gang kept so far is slower
        better = next((kept[t] for t in rivals if as_good[sources[kept[t]], sources[s]]), None)
        if better is None:
            kept_costs[len(kept)] = costs[s]
            kept.append(s)
        else:
            beaten[fitting[s].name] = fitting[better].name
    return tuple(fitting[s] for s in kept), beaten


def _lost(columns: Sequence[RolloutColumn], sources: set[Source], relays: frozenset[str]) -> dict[Source, Floats]:
    """Returns, for each source of versions, an array of delays in seconds, by which sources are compared. It holds the
    blocking times of those columns for which they differ between publishing classes, then all distinct lags."""
    if not sources:
        return {}
    order, roots = list(sources), sorted({root for root, _ in sources})
    blocking = np.array([[one.blocking_s[root] for one in columns] for root in roots]).reshape(len(roots), -1)
    blocking = blocking[:, (blocking != blocking[:1]).any(axis=0)]
    lags = lags_of(columns, roots)
    late = np.array([lags.every(source, sorted(relays)) for source in order])
    by_column = np.moveaxis(late, 2, 0)
    distinct = {figures.tobytes(): figures for figures in by_column}  # all columns of a class are alike
    return {
        source: np.concatenate([blocking[roots.index(source[0])], *(figures[i] for figures in distinct.values())])
        for i, source in enumerate(order)
    }


ROUNDING = 1e-12
"""Share added to shortest periods against rounding, so that exact arithmetic agrees that a column's answers are in
time."""


@dataclass(frozen=True)
class Windows:
    """Shortest periods in which a long answer (of `Demand.tail_tokens`) is in time for training, by gang and rollout
    column. Stored by source of versions, because thousands of gangs share a few sources."""

    late_s: Floats
    """Array of (1 + relays) x sources x columns: seconds from publication (with bound 0, from the start of training) to
    the end of a long answer. In the first row only the gang's own classes relay versions; in each further row one more
    class does too. Infinite if a gang leaves a column too little memory."""
    source: Ints
    """Index of each gang's source in `late_s`."""
    trained_s: Floats
    """Seconds of a training step of each gang, which are added to `late_s`; 0 if `late_s` includes them (staleness
    bound 0) or there is no age window."""
    num_periods: float = 1.0
    """Number of periods within which a version must be trained and transferred and a long answer must end."""
    stretch: float = 1.0
    """Factor on the shortest periods; above 1, long answers must end earlier."""

    @cached_property
    def opens_s(self) -> Floats:
        """Array of gangs x columns: shortest periods in which long answers are in time, if the best class relays
        versions."""
        return self._periods(self.late_s.min(axis=0)[self.source], self.trained_s)

    def alone_s(self, gangs: Ints) -> Floats:
        """The first row of `ways_s`: shortest periods if only the gang's own classes relay versions."""
        return self._periods(self.late_s[0, self.source[gangs]], self.trained_s[gangs])

    def ways_s(self, gangs: Ints) -> Floats:
        """Array of (1 + relays) x gangs x columns: shortest periods in which long answers are in time. In the first row
        only the gang's own classes relay versions; in each further row one more class does too."""
        return self._periods(self.late_s[:, self.source[gangs]], self.trained_s[gangs])

    def _periods(self, late_s: Floats, trained_s: Floats) -> Floats:
        return (late_s + trained_s[:, None]) / self.num_periods * (1 + ROUNDING) * self.stretch


def windows(
    problem: PlanningProblem, gangs: Sequence[Gang], columns: Sequence[Sequence[RolloutColumn]], overs: Sequence[str]
) -> tuple[Floats, Windows]:
    """Returns two results by gang and column: the seconds of a period in which a replica does not generate, and the
    shortest periods in which a long answer is in time for training. `overs` are the classes that may relay versions."""
    demand = problem.demand
    relays = relays_of(problem)
    sources = [source_of(gang, relays) for gang in gangs]
    known = {source: i for i, source in enumerate(dict.fromkeys(sources))}
    of_gang = np.array([known[source] for source in sources], dtype=np.int64)
    first = [shapes[0] for shapes in columns]
    lags = lags_of(first, {root for root, _ in known})
    lost = [[column.blocking_s[root] for column in first] for root, _ in known]
    blocking = np.array(lost, dtype=float).reshape(len(known), len(first))[of_gang]
    every = np.array([lags.every(source, overs) for source in known]).reshape(len(known), 1 + len(overs), len(first))
    lag_s = every.transpose(1, 0, 2) + demand.lag_s
    tail_s = demand.tail_tokens * np.array([column.token_s for column in first], dtype=float)
    trained_s = np.array([gang.period_s for gang in gangs], dtype=float)
    if demand.bound == 0:
        blocking = blocking + trained_s[:, None] + lag_s[0, of_gang]
        return blocking, _taking_turns(gangs, first, blocking + tail_s if demand.tail_tokens else 0.0)
    if not demand.tail_tokens:
        return blocking, Windows(np.zeros(lag_s.shape), of_gang, np.zeros(len(gangs)))
    return blocking, Windows(tail_s + lag_s, of_gang, trained_s, demand.bound + 1 - demand.age_guard)


def _taking_turns(gangs: Sequence[Gang], columns: Sequence[RolloutColumn], late_s: Floats | float) -> Windows:
    """Returns the `Windows` for staleness bound 0, with `late_s` as the seconds until a long answer ends, for each gang
    and column. Training and generation take turns then, and a gang (cards that train together) keeps its training state
    in memory while its cards generate. Where this leaves a replica of the column too little memory, the entry is
    infinite, which rules the pair out."""
    room = np.array([np.inf if column.room_bytes is None else column.room_bytes for column in columns])
    offers = sorted({column.offer for column in columns})
    kept = np.array([[gang.kept_bytes.get(name, 0.0) for name in offers] for gang in gangs], dtype=float)
    fits = kept.reshape(len(gangs), len(offers))[:, [offers.index(column.offer) for column in columns]] <= room
    return Windows(np.where(fits, late_s, np.inf)[None], np.arange(len(gangs)), np.zeros(len(gangs)))


MICRO = 1_000_000


def micros(price: float) -> int:
    return round(price * MICRO)


@dataclass(frozen=True)
class ColumnCounts:
    """A plan as the index of its gang and the number of replicas of each column (replica shape) of a view."""

    gang: int
    replicas: tuple[int, ...]
    """Number of replicas of each column, in the order of `View.columns`."""


@dataclass(frozen=True)
class View:
    """A planning problem as arrays over merged classes of nodes, rollout columns (replica shapes) and training
    gangs."""

    problem: PlanningProblem
    offers: tuple[tuple[str, ...], ...]
    """Names of the offers (classes of nodes) in each merged class, which unites equal classes. Home classes (nodes that
    train and also run replicas) are not merged and come last."""
    is_home: NDArray[np.bool_]
    columns: tuple[tuple[RolloutColumn, ...], ...]
    """For each column, the equal replica shapes on all offers of its merged class."""
    gangs: tuple[Gang, ...]
    beaten: Mapping[str, str]
    """Names of dropped gangs, each with the name of a gang that beats it in every respect."""
    per_node: Ints
    num_nodes: Ints
    most_generating: Ints
    """Largest number of nodes of each merged class that may be rented for rollout."""
    least_generating: Ints
    """Smallest number of nodes of each merged class on which replicas run."""
    node_price: Ints
    group: Ints
    """Index of each column's merged class; columns are sorted by this index."""
    accelerators: Ints
    concurrency: Ints
    rate: Floats
    blocking: Floats
    """Array of gangs x columns: seconds of a period in which a column does not generate, including training if
    generation waits for it."""
    windows: Windows
    """Shortest periods in which a long answer of each column is in time for training."""
    relays: Ints
    """Indices of the merged classes that may relay versions."""
    gang_nodes: Ints
    """Array of gangs x classes: number of nodes that a gang takes; negative for home classes (nodes that train and also
    run replicas), because the gang brings these nodes."""
    gang_price: Ints
    """Price of each gang's nodes, in millionths of $/h."""
    period: Floats
    """Shortest period in seconds that each gang and the reward pool allow."""

    @property
    def demand_tokens(self) -> float:
        return self.problem.demand.tokens

    @cached_property
    def in_flight_cap(self) -> float:
        """Largest number of trajectories in flight: the staleness bound times the trajectories of a step, less the
        number that waits for training. With bound 0, it is the number of trajectories of a step."""
        demand = self.problem.demand
        return demand.bound * demand.trajectories - demand.queue if demand.bound else float(demand.trajectories)

    @cached_property
    def fixed_price(self) -> int:
        return micros(self.problem.fixed_price_per_h)

    @cached_property
    def free_nodes(self) -> Ints:
        """Array of gangs x classes: nodes that replicas may use. They are the nodes that the gang leaves free or, for a
        home class, the gang's own nodes."""
        return np.minimum(self.num_nodes - self.gang_nodes, self.most_generating)

    @cached_property
    def most_nodes(self) -> Ints:
        """Largest number of nodes that any gang leaves to replicas or shares with them, by class."""
        return self.free_nodes.max(axis=0, initial=0)

    def tokens(self, tau_s: float | Floats, gangs: slice | Ints = slice(None)) -> Floats:
        """Array of gangs x columns: tokens that one replica generates in a period of `tau_s`; 0 if its long answers
        would be too late for training."""
        tau = np.asarray(tau_s, dtype=float)
        tau = tau[:, None] if tau.ndim else tau
        yielded = self.rate * np.maximum(tau - self.blocking[gangs], 0.0)
        return np.where(self.windows.opens_s[gangs] <= tau, yielded, 0.0)

    def opening_s(self, counts: ColumnCounts) -> Floats:
        """Shortest period, for each column, in which a long answer is in time for training. New versions are relayed by
        the gang's classes and by those that generate in the plan."""
        generates = np.isin(self.relays, self.group[np.array(counts.replicas) > 0])
        ways_s = self.windows.ways_s(np.array([counts.gang]))
        return ways_s[np.append(True, generates), 0].min(axis=0)

    def needs(self, tau_s: float, gangs: Ints) -> Ints:
        """Array of gangs x columns: the relaying classes with which a column's long answers are in time, as one bit for
        each of `relays`; 0 if no relay is needed, or none helps."""
        in_time = self.windows.ways_s(gangs) <= tau_s
        bits = (in_time[1:] * (1 << np.arange(len(self.relays)))[:, None, None]).sum(axis=0)
        return np.where(in_time[0], 0, bits)

    def nodes(self, counts: ColumnCounts) -> Ints:
        """Nodes that the replicas of a plan need, by merged class."""
        used = np.bincount(self.group, self.accelerators * np.array(counts.replicas), len(self.per_node)).astype(int)
        return np.asarray(-(-used // self.per_node))

    def price(self, counts: ColumnCounts) -> int:
        return int(self.fixed_price + self.gang_price[counts.gang] + self.nodes(counts) @ self.node_price)

    def in_flight(self, counts: ColumnCounts) -> int:
        return int(self.concurrency @ np.array(counts.replicas))


def view_of(problem: PlanningProblem) -> View:
    """Builds the view of a problem. Raises ValueError if two columns or two gangs have the same name. Also raises it if
    a replica could be split between nodes: of the sizes of replicas and nodes of a class, each must divide the next."""
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
    gangs, beaten = efficient_gangs(
        problem, partial(_gang_nodes, problem=problem, merged=merged, own=own), own, columns
    )
    first = [problem.offers[names[0]] for names in (*merged, *own)]
    offered = [sum(problem.offers[name].num_nodes for name in names) for names in merged]
    most = [sum(problem.offers[name].num_free(0) for name in names) for names in merged]
    prices = [micros(problem.offers[names[0]].node_price_per_h) for names in merged]
    passing = relays_of(problem)
    relays = [k for k, names in enumerate(merged) if passing.issuperset(names)]
    blocking, fitting = windows(problem, gangs, columns, [merged[k][0] for k in relays])
    reward_s = problem.demand.trajectories / problem.demand.reward_rate if problem.demand.reward_rate else 0.0
    gang_nodes = _gang_nodes(gangs, problem, merged, own)
    node_price = np.array(prices + [0] * len(own), dtype=np.int64)
    return View(
        problem=problem,
        offers=(*merged, *own),
        is_home=np.arange(len(first)) >= len(merged),
        columns=columns,
        gangs=gangs,
        beaten=beaten,
        per_node=np.array([offer.per_node for offer in first[: len(merged)]] + [1] * len(own), dtype=np.int64),
        num_nodes=np.array(offered + [0] * len(own), dtype=np.int64),
        least_generating=np.array([offer.least_generating for offer in first[: len(merged)]] + [0] * len(own)),
        most_generating=np.array(most + [np.iinfo(np.int64).max] * len(own), dtype=np.int64),
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


def restore(view: View, counts: ColumnCounts, tau_s: float) -> Solution:
    """Translates counts by index into a solution by names. Replicas are laid out on nodes largest first; their sizes
    divide one another, so no replica crosses a node."""
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
            num = min(left, view.problem.offers[name].num_free(gang.nodes.get(name, 0)))
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
        assert left == 0, f"bug: the plan uses {left} more nodes of {names} than are on offer"
    return Solution(tau_s, gang.name, placed, rented)


def _check(problem: PlanningProblem) -> None:
    for kind, names in (
        ("rollout column", [column.name for column in problem.rollout]),
        ("gang", [gang.name for gang in problem.gangs]),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"problem: two {kind}s are called {max(names, key=names.count)!r}; names must be unique")
    for name, offer in problem.offers.items():
        sizes = sorted({column.num_accelerators for column in problem.rollout if column.offer == name})
        for small, large in itertools.pairwise([*sizes, offer.per_node]):
            if large % small:
                all_sizes = ", ".join(map(str, [*sizes, offer.per_node]))
                raise ValueError(
                    f"class {name}: {small} does not divide {large}, so a replica could be split between nodes; each "
                    f"of {all_sizes} (accelerators in its replicas and, last, in a node) must divide the next"
                )


def _columns_of(problem: PlanningProblem, offer: str, *, is_home: bool = False) -> list[RolloutColumn]:
    """Returns the columns (replica shapes) on rented nodes of the class `offer`. With `is_home`, returns columns on
    nodes of this class that also train."""
    return [column for column in problem.rollout if column.offer == offer and column.is_home == is_home]


def _merged(problem: PlanningProblem, by_offer: ByOffer, roots: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    relays = relays_of(problem)
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name, offer in sorted(problem.offers.items()):
        # A class that relays, or gets versions from a relay, is never merged.
        alone = name if name in relays or any(column.lag_over_s for column in by_offer[name]) else None
        # A limit on rented nodes is one class's own, and cannot be shared out between merged ones.
        alone = alone or (name if offer.most_generating is not None or offer.least_generating else None)
        kinds[(offer.per_node, micros(offer.node_price_per_h), len(by_offer[name]), alone)].append(name)
    groups: list[list[str]] = []
    for names in kinds.values():
        alike: dict[object, list[str]] = defaultdict(list)
        for name in names:
            alike[tuple(figures(one, roots) for one in by_offer[name]) if len(names) > 1 else None].append(name)
        groups += alike.values()
    return _sorted(groups, problem, by_offer, roots)


def _homes(problem: PlanningProblem, by_offer: ByOffer, roots: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the home classes (training nodes that also run replicas), each as a tuple of one name. They are not
    merged, because a gang may keep different state on otherwise equal classes."""
    return _sorted([[name] for name in sorted(problem.offers) if by_offer[name]], problem, by_offer, roots)


def _sorted(
    groups: Iterable[list[str]], problem: PlanningProblem, by_offer: ByOffer, roots: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Sorts groups of classes by price, size and speed, never by their names."""

    def size(names: list[str]) -> tuple[float, int, int]:
        first = problem.offers[names[0]]
        return first.node_price_per_h, first.per_node, sum(problem.offers[name].num_nodes for name in names)

    def speed(names: list[str]) -> list[tuple[object, ...]]:
        columns = by_offer[names[0]]
        return [(*figures(one, ()), *sorted(figures(one, (root,)) for root in roots)) for one in columns]

    found: list[list[str]] = []
    for _, same in itertools.groupby(sorted(groups, key=size), key=size):
        equal = list(same)
        found += sorted(equal, key=speed) if len(equal) > 1 else equal
    return tuple(map(tuple, found))


def _gang_nodes(
    gangs: Sequence[Gang], problem: PlanningProblem, merged: Sequence[Sequence[str]], own: Sequence[Sequence[str]]
) -> Ints:
    bound = problem.demand.bound
    nodes = [
        [sum(gang.nodes.get(name, 0) for name in names) for names in merged]
        + [-gang.num_home_cards(problem.offers[name], bound) for (name,) in own]
        for gang in gangs
    ]
    return np.array(nodes, dtype=np.int64).reshape(len(gangs), len(merged) + len(own))
