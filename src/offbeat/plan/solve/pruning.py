"""Leaves out columns and gangs that another one beats in every respect: every optimum stays.

Order comes from figures; names decide only between those whose figures are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from offbeat.plan.problem import Gang, Problem, RolloutColumn
from offbeat.plan.solve.lags import Floats, Ints, Source, lags_of, relays_of, source_of


def figures(column: RolloutColumn, roots: Sequence[str]) -> tuple[float, ...]:
    """All that an answer can depend on; those of replicas whose figures are equal are interchangeable."""
    by_root = (
        figure
        for root in roots
        for figure in (
            column.blocking_s[root],
            column.lag_from_s(root),
            *sorted(column.lag_over_s.get(root, {}).values()),
        )
    )
    room = () if column.room_bytes is None else (column.room_bytes,)
    return (column.num_accelerators, column.concurrency, column.tokens_per_s, column.token_s, *room, *by_root)


def efficient(columns: list[RolloutColumn], roots: Sequence[str]) -> list[RolloutColumn]:
    """Those that no other beats per accelerator in every respect, in the order of their figures.

    What replaces a replica must fit its place, so its size has to divide the other's.
    """
    columns = sorted(columns, key=lambda column: (*figures(column, roots), column.name))
    columns = [c for c, before in zip(columns, [None, *columns], strict=False) if not _same(c, before, roots)]
    if not columns:
        return columns
    size = np.array([column.num_accelerators for column in columns])
    worse = [np.array([column.concurrency for column in columns]) / size]
    worse += [-np.array([column.tokens_per_s for column in columns]) / size]
    worse += [np.array([column.token_s for column in columns])]
    worse += [np.array([column.blocking_s[root] for column in columns]) for root in roots]
    lags = lags_of(columns, roots)
    worse += [*lags.direct_s.values(), *lags.over_s.values()]
    worse += [-np.array([column.room_bytes or 0.0 for column in columns])]
    beats = size[None, :] % size[:, None] == 0
    for figure in worse:
        beats &= figure[:, None] <= figure[None, :]
    order = np.arange(len(columns))
    beats &= ~beats.T | (order[:, None] < order[None, :])  # of two that are equal the first stays
    np.fill_diagonal(beats, False)
    return [column for column, is_beaten in zip(columns, beats.any(axis=0), strict=True) if not is_beaten]


def _same(column: RolloutColumn, other: RolloutColumn | None, roots: Sequence[str]) -> bool:
    return (
        other is not None and figures(column, roots) == figures(other, roots) and column.lag_over_s == other.lag_over_s
    )


def efficient_gangs(
    problem: Problem,
    nodes_of: Callable[[Sequence[Gang]], Ints],
    own: Sequence[Sequence[str]],
    columns: Sequence[Sequence[RolloutColumn]],
) -> tuple[tuple[Gang, ...], dict[str, str]]:
    """Those that fit the offers and that no other beats in nodes, period, what its publishing costs and what it keeps
    on cards that generate too; and by whom the others are beaten. Who brings fewer home nodes beats nobody."""
    fitting = [
        gang
        for gang in problem.gangs
        if all(
            num <= (problem.offers[name].num_nodes if name in problem.offers else 0) for name, num in gang.nodes.items()
        )
    ]
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
    # Whether publishing from some classes loses no more anywhere than from others.
    as_good = {(one, other): bool((lost[one] <= lost[other]).all()) for one in lost for other in lost}
    kept: list[int] = []
    kept_costs = np.empty_like(costs)
    beaten: dict[str, str] = {}
    for s in sorted(range(len(fitting)), key=lambda s: (*keys[s], fitting[s].name)):
        rivals = np.flatnonzero((kept_costs[: len(kept)] <= costs[s]).all(axis=1))  # none of them is slower
        better = next((kept[t] for t in rivals if as_good[sources[kept[t]], sources[s]]), None)
        if better is None:
            kept_costs[len(kept)] = costs[s]
            kept.append(s)
        else:
            beaten[fitting[s].name] = fitting[better].name
    return tuple(fitting[s] for s in kept), beaten


def _lost(
    columns: Sequence[RolloutColumn], sources: Collection[Source], relays: frozenset[str]
) -> dict[Source, Floats]:
    """By source: what columns lose by it, time and lags; what they lose to every source alike is left out."""
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
