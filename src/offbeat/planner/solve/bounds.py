"""Lower bounds on the period or the price of every plan by weak duality, for all training gangs at once.

Multipliers (dual prices) put a price on demand (nu per token), on the cap on trajectories in flight (lam per
trajectory) and on money (mu per millionth of a $/h). A replica is then worth nu * its tokens - lam * its trajectories
in flight. A node is worth at most its accelerators times the best worth per accelerator of any column (replica shape),
less mu * its price. A plan with a given gang and a price of at most P exists only if

    nu * demand <= lam * in-flight cap + mu * (P - price of gang and reward pool)
                   + sum over classes of free nodes * max(0, worth of a node).

This holds for all multipliers of 0 or more, so a solver may guess them and plain arithmetic can check the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from offbeat.planner.solve.view import Floats, Ints, View

MARGIN = 1e-9
"""Relative rounding error of floats; an excess below it proves nothing."""
BISECTIONS = 26
THINNING = (1.15, 1.07, 1.03, 1.0 + 1e-9)
"""Ratios between the trajectories in flight of neighbouring columns that `envelope` keeps, until they are close
enough."""
MANY_COLUMNS, TIGHT = 500, 1e-4
"""Number of columns above which linear relaxations take the `envelope` instead, and how close that is. Dual prices from
it prove as much, because they are checked against all columns."""
LIKELY = 4
"""Number of columns (replica shapes) per class that `likely` returns. A good plan uses the best column, and a few
others to fill the cards that are left."""


@dataclass(frozen=True)
class Multipliers:
    nu: float
    lam: float
    mu: float


def worth(view: View, tau_s: float | Floats, prices: Multipliers, gangs: Ints) -> Floats:
    """Returns an array of training gangs x node classes: the worth of one node at these dual prices if filled with
    its best kind of replica. The price of the node is not deducted. `gangs` are indices into the gangs of `view`;
    `tau_s` is the period of a step, in seconds."""
    value = (prices.nu * view.tokens(tau_s, gangs) - prices.lam * view.concurrency) / view.accelerators
    starts = np.searchsorted(view.group, np.arange(len(view.per_node)))
    best = np.zeros((len(gangs), len(view.per_node)))
    has = np.bincount(view.group, minlength=len(view.per_node)) > 0
    best[:, has] = np.maximum(np.maximum.reduceat(value, starts[has], axis=1), 0.0)
    return best * view.per_node


def excess(view: View, tau_s: float | Floats, prices: Multipliers, budget: int | None, gangs: Ints) -> Floats:
    """Returns for each gang the worth of the demanded tokens at these dual prices, less an upper bound on what plans
    with this gang can supply. A positive number proves that the gang has no plan at period `tau_s` for at most `budget`
    (millionths of $/h)."""
    nodes = worth(view, tau_s, prices, gangs)
    supply = (view.free_nodes[gangs] * np.maximum(nodes - prices.mu * view.node_price, 0.0)).sum(axis=1)
    money: Floats = np.zeros(len(gangs))
    if prices.mu:
        assert budget is not None, f"bug: the dual price of money is {prices.mu:g} without a budget"
        money = np.asarray(prices.mu * (budget - view.fixed_price - view.gang_price[gangs]), dtype=float)
    demand = prices.nu * view.demand_tokens
    # The margin grows with the terms, because large terms that cancel leave large rounding errors.
    size = demand + prices.lam * view.in_flight_cap + np.abs(money) + supply
    return demand - prices.lam * view.in_flight_cap - money - supply - MARGIN * size


def possible(view: View, tau_s: float, prices: Multipliers, budget: int | None, gang: int) -> Ints:
    """Returns the indices of the columns (replica shapes) that a plan of this gang can contain: the others are proven
    to be of no use at these dual prices. Every replica of a column costs a plan what its cards are worth less what it
    is worth itself, and a plan can afford no more than the `excess` that is missing to a proof."""
    only = np.array([gang])
    spare = -float(excess(view, tau_s, prices, budget, only)[0])
    if budget is None and prices.mu:
        return np.arange(len(view.columns))
    card = worth(view, tau_s, prices, only)[0] / view.per_node
    tokens = view.tokens(tau_s, only)[0]
    lost = card[view.group] * view.accelerators + prices.lam * view.concurrency - prices.nu * tokens
    # `excess` has a margin for rounding; the terms of one replica are no larger than those of the whole.
    margin = MARGIN * (prices.nu * view.demand_tokens + prices.lam * view.in_flight_cap)
    return np.flatnonzero((lost <= spare + margin) & (tokens > 0))


def likely(view: View, tau_s: float, prices: Multipliers, gang: int) -> Ints:
    """Returns the indices of columns (replica shapes) that a good plan of this gang probably uses: of each node class,
    the few whose accelerators are worth most at these dual prices. A guess, not a proof."""
    tokens = view.tokens(tau_s, np.array([gang]))[0]
    value = np.where(tokens > 0, (prices.nu * tokens - prices.lam * view.concurrency) / view.accelerators, -np.inf)
    order = np.lexsort((-value, view.group))
    place = np.arange(len(order)) - np.searchsorted(view.group, view.group[order])
    return np.sort(order[(place < LIKELY) & np.isfinite(value[order])])


def envelope(view: View, tau_s: float, gang: int, within: float) -> tuple[Ints, float]:
    """Returns the indices of a few columns (replica shapes) and a factor of at most 1 + `within`. Raised by this
    factor, mixtures of these columns generate as many tokens as any column does, on as many cards of the same class and
    with as many trajectories in flight."""
    tokens = view.tokens(tau_s, np.array([gang]))[0] / view.accelerators
    flight = view.concurrency / view.accelerators
    kept, factor = [np.zeros(0, dtype=np.int64)], 1.0
    for k in range(len(view.per_node)):
        mine = np.flatnonzero((view.group == k) & (tokens > 0))
        if not len(mine):
            continue
        mine = mine[np.lexsort((-tokens[mine], flight[mine]))]
        best = np.maximum.accumulate(tokens[mine])
        mine = mine[np.append(True, best[1:] > best[:-1])]
        corners = mine[_corners(flight[mine], tokens[mine])]
        for growth in THINNING:
            steps = np.log(flight[corners] / flight[corners[0]]) // math.log(growth)
            few = corners[np.append(np.append(True, steps[1:] != steps[:-1])[:-1], True)]
            # Up to the first of them, which has the most tokens for each trajectory, a part of it stands for a column.
            mixed = np.interp(flight[mine], np.append(0.0, flight[few]), np.append(0.0, tokens[few]))
            most = float((tokens[mine] / mixed).max())
            if most <= 1 + within:
                break
        kept.append(few)
        factor = max(factor, most)
    return np.sort(np.concatenate(kept)), factor


def _corners(x: Floats, y: Floats) -> list[int]:
    """Returns the indices of the corners of the upper hull of points with rising `x` and `y`, and of the origin, which
    is left out."""
    found: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for i, (right, up) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        while len(found) > 1:
            (x0, y0, _), (x1, y1, _) = found[-2:]
            if (y1 - y0) * (right - x0) > (up - y0) * (x1 - x0):
                break
            found.pop()
        found.append((right, up, i))
    return [i for _, _, i in found[1:]]


def shortest_periods(
    view: View, prices: Multipliers, budget: int | None, gangs: Ints, low_s: Floats, high_s: float
) -> Floats:
    """Returns for each training gang the longest period found, below `high_s`, for which these dual prices prove that
    the gang has no plan; `low_s` if they prove nothing. The proof also holds for shorter periods, because nodes
    generate less in them."""
    lasting = excess(view, low_s, prices, budget, gangs) > 0
    low, mine = low_s.copy(), gangs[lasting]
    if not len(mine):
        return low
    bottom, top = np.log(low_s[lasting]), np.full(len(mine), np.log(high_s))
    for _ in range(BISECTIONS):
        middle = (bottom + top) / 2
        proves = excess(view, np.exp(middle), prices, budget, mine) > 0
        bottom, top = np.where(proves, middle, bottom), np.where(proves, top, middle)
    low[lasting] = np.maximum(np.exp(bottom), low_s[lasting])
    return low


def least_prices(view: View, tau_s: float, prices: Multipliers, gangs: Ints) -> Floats:
    """Returns for each training gang a lower bound on the price of its plans at this period, in millionths of $/h;
    infinite if the dual prices prove that the gang has no plan."""
    nodes = worth(view, tau_s, prices, gangs)
    if not prices.mu:
        return np.where(excess(view, tau_s, prices, None, gangs) > 0, np.inf, 0.0)
    supply = (view.free_nodes[gangs] * np.maximum(nodes / prices.mu - view.node_price, 0.0)).sum(axis=1)
    demand = (prices.nu * view.demand_tokens - prices.lam * view.in_flight_cap) / prices.mu
    return view.fixed_price + view.gang_price[gangs] + (demand - supply) * (1 - MARGIN) - 1.0


def most_tokens(
    view: View, tau_s: float, gang: int, budget: int | None, nodes: Ints | None = None
) -> tuple[float, Multipliers]:
    """Solves a linear relaxation: returns the most tokens per period with this gang for at most `budget` (millionths of
    $/h; None: any price), and the dual prices that prove it. `nodes` limits the nodes of each class; what the dual
    prices then say is a hint, not a proof."""
    rows, room, cost, unit, flight = _relaxation(view, tau_s, gang)
    num_y = len(flight)
    if budget is not None:
        scale, money = _money(view, num_y)
        left = (budget - view.fixed_price - view.gang_price[gang]) / scale
        if left < 0:
            return 0.0, Multipliers(0.0, 0.0, 1.0)
        rows, room = np.vstack([rows, money]), np.append(room, left)
    result = linprog(-cost, rows, room, bounds=_limits(view, gang, num_y, nodes), method="highs")
    marginals = -result.ineqlin.marginals * unit
    mu = max(float(marginals[-1]) / scale, 0.0) if budget is not None else 0.0
    return -result.fun * unit, Multipliers(1.0, max(float(marginals[0]), 0.0), mu)


def least_price(view: View, tau_s: float, gang: int) -> Multipliers | None:
    """Solves a linear relaxation that bounds the price of this gang's plans from below. Returns the dual prices of the
    relaxation, or None if it has no solution."""
    rows, room, cost, unit, flight = _relaxation(view, tau_s, gang)
    num_y = len(flight)
    scale, price = _money(view, num_y)
    rows, room = np.vstack([rows, -cost]), np.append(room, -view.demand_tokens / unit)
    result = linprog(price, rows, room, bounds=_limits(view, gang, num_y), method="highs")
    if result.status != 0:
        return None
    marginals = -result.ineqlin.marginals * scale
    return Multipliers(max(float(marginals[-1]) / unit, 0.0), max(float(marginals[0]), 0.0), 1.0)


def least_in_flight(view: View, tau_s: float, gang: int, budget: int) -> tuple[float, Multipliers] | None:
    """Solves a linear relaxation: returns the fewest trajectories in flight with this gang for at most `budget`
    (millionths of $/h), and the dual prices that prove it; None if the relaxation has no solution."""
    rows, room, cost, unit, flight = _relaxation(view, tau_s, gang)
    num_y = len(flight)
    (scale, money), widest = _money(view, num_y), float(view.concurrency.max())
    left = (budget - view.fixed_price - view.gang_price[gang]) / scale
    flight = np.concatenate([flight / widest, np.zeros(len(view.node_price))])
    rows, room = np.vstack([rows, money, -cost]), np.append(room, [left, -view.demand_tokens / unit])
    result = linprog(flight, rows, room, bounds=_limits(view, gang, num_y), method="highs")
    if result.status != 0:
        return None
    mu, nu = np.maximum(-result.ineqlin.marginals[-2:] * widest, 0.0)
    return result.fun * widest, Multipliers(float(nu) / unit, 1.0, float(mu) / scale)


def _relaxation(view: View, tau_s: float, gang: int) -> tuple[Floats, Floats, Floats, float, Ints]:
    """Builds the linear relaxation of one gang. Its variables are the replicas of each column, or of the `envelope` if
    there are many columns, then the nodes of each class. Returns the constraint rows (in-flight cap, then accelerators
    of each class), their right-hand sides, the tokens of each variable in a common unit, this unit in tokens, and the
    trajectories in flight of each column."""
    num_n = len(view.per_node)
    few, factor = np.arange(len(view.columns)), 1.0
    if len(few) > MANY_COLUMNS:
        few, factor = envelope(view, tau_s, gang, TIGHT)
    num_y = len(few)
    tokens = view.tokens(tau_s, np.array([gang]))[0, few] * factor
    unit = float(max(tokens.max(initial=0.0), 1e-300))
    rows = np.zeros((1 + num_n, num_y + num_n))
    rows[0, :num_y] = view.concurrency[few]
    rows[1 + view.group[few], np.arange(num_y)] = view.accelerators[few]
    rows[1 + np.arange(num_n), num_y + np.arange(num_n)] = -view.per_node
    room = np.append(view.in_flight_cap, np.zeros(num_n))
    return rows, room, np.append(tokens / unit, np.zeros(num_n)), unit, view.concurrency[few]


def _money(view: View, num_y: int) -> tuple[float, Floats]:
    """Returns the price of the most expensive node (at least 1), and the prices of all variables of `_relaxation` in
    units of that price. Its `num_y` replicas cost 0, because their nodes are paid for."""
    scale = float(max(view.node_price.max(), 1))
    return scale, np.concatenate([np.zeros(num_y), view.node_price / scale])


def _limits(view: View, gang: int, num_y: int, nodes: Ints | None = None) -> list[tuple[float, float | None]]:
    most = view.free_nodes[gang] if nodes is None else nodes
    return [(0.0, None)] * num_y + [(0.0, float(num)) for num in most]
