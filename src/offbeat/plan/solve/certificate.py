"""What proves a plan: up to which period, and for how much money, there is no other; and on whose word.

The proof is a list of prices (see `bounds`): for every gang that is fast enough one of them shows, by plain arithmetic,
that no plan exists. Where rounding to whole nodes and replicas leaves a slit that no prices close, the gang is listed
under the solver's name: that part rests on its word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy

from offbeat.plan.problem import Problem
from offbeat.plan.solve.bounds import Multipliers, excess
from offbeat.plan.solve.view import MICRO, View


@dataclass(frozen=True)
class Certificate:
    """No plan has a period of `tau_lo_s` or less and a price of `price_cap` or less."""

    tau_lo_s: float
    price_cap: int | None
    """Millionths of $/h, all included; None: at any price."""
    gap: float
    """Between what is proven and the plan: of the period, or of the price where the period was given."""
    prices: tuple[Multipliers, ...]
    by_solver: tuple[str, ...]
    """Gangs that only the solver ruled out."""
    columns_sha256: str
    solver: str
    cost_model: str = "unstated"
    held_out_error: float | None = None
    """Of the cost model, on measurements that it was not fitted to: what the gap cannot tell."""


def digest(problem: Problem) -> str:
    """Of everything that the proof speaks about; the order of keys does not matter."""
    # Records by their fields, as `asdict` gives them, without its copies: a large inventory has thousands of gangs.
    return hashlib.sha256(json.dumps(problem, default=vars, sort_keys=True).encode()).hexdigest()


def certify(view: View, pool: Sequence[Multipliers], tau_lo_s: float, price_cap: int | None, gap: float) -> Certificate:
    """Keeps the prices that rule some gang out, and names the gangs for which none does."""
    open_gangs = np.flatnonzero(view.period <= tau_lo_s)
    kept = []
    for prices in reversed(pool):  # the last ones were found nearest to the end
        if not len(open_gangs):
            break
        if prices.mu and price_cap is None:
            continue
        is_closed = excess(view, tau_lo_s, prices, price_cap, open_gangs) > 0
        if is_closed.any():
            kept.append(prices)
            open_gangs = open_gangs[~is_closed]
    left = {view.gangs[s].name for s in open_gangs}
    by_solver = (*sorted(left), *sorted(name for name, better in view.beaten.items() if better in left))
    return Certificate(
        tau_lo_s,
        price_cap,
        max(gap, 0.0),
        tuple(kept),
        by_solver,
        digest(view.problem),
        f"HiGHS in scipy {scipy.__version__}",
    )


def distance(certificate: Certificate, tau_s: float, price_per_h: float, *, is_for_price: bool) -> float:
    """Of a plan from what is proven: by its period, or by its price where the period was given."""
    if not is_for_price:
        return max(tau_s / certificate.tau_lo_s - 1, 0.0)
    least = 0 if certificate.price_cap is None else certificate.price_cap + 1
    return max(price_per_h * MICRO / max(least, 1) - 1, 0.0)


def to_json(certificate: Certificate) -> dict[str, Any]:
    return asdict(certificate)


def from_json(fields: Mapping[str, Any]) -> Certificate:
    prices = tuple(Multipliers(**each) for each in fields["prices"])
    return Certificate(**{**fields, "prices": prices, "by_solver": tuple(fields["by_solver"])})
