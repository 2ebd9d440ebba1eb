"""The proof that comes with a plan: no plan has a period, or a price, below a stated bound.

For every training gang that is fast enough for a better plan, the certificate holds dual prices (see `bounds`). They
show by plain arithmetic that no better plan uses this gang. Dual prices come from a relaxation in which numbers of
nodes and replicas may be fractions, so they cannot rule out every gang. `by_solver` lists the gangs that only the
integer program ruled out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import scipy

from offbeat.planner.problem import Branch, PlanningProblem
from offbeat.planner.solve.bounds import Multipliers, excess
from offbeat.planner.solve.view import MICRO, View


@dataclass(frozen=True)
class Question:
    """What was asked: what is proven holds for this alone."""

    cluster_sha256: str
    """`digest_of` the inventory. Comments and order in its file do not matter."""
    workload_sha256: str
    constants_sha256: str
    budget: float | None
    throughput: float | None
    max_staleness: int
    cost_model: str


def digest_of(record: Any) -> str:
    """SHA-256 of a record of dataclasses, mappings, sets and plain values, as hex digits."""
    return hashlib.sha256(json.dumps(_plain(record), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return sorted(([_plain(key), _plain(each)] for key, each in value.items()), key=json.dumps)
    if isinstance(value, frozenset | set):
        return sorted(map(_plain, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


@dataclass(frozen=True)
class BranchProof:
    """Proof for one part of all plans (`branches`): its fields are as in `Certificate`."""

    branch: Branch
    prices: tuple[Multipliers, ...]
    by_solver: tuple[str, ...]


@dataclass(frozen=True)
class Certificate:
    """States that no plan has both a period of at most `tau_lo_s` and a price of at most `price_cap`."""

    tau_lo_s: float
    price_cap: int | None
    """Millionths of $/h, including the reward pool; None: any price."""
    gap: float
    """Gap between plan and bound, relative to the bound: in price if the user asked for a throughput, otherwise in
    period."""
    prices: tuple[Multipliers, ...]
    by_solver: tuple[str, ...]
    """Names of gangs that only the solver ruled out, without a proof by dual prices."""
    columns_sha256: str
    """`digest` of the planning problem for which this is proven."""
    solver: str
    branches: tuple[BranchProof, ...] = ()
    """Proofs of the parts into which all plans were split; then `prices` and `by_solver` are empty."""
    num_shapes: int = 0
    """Number of gangs and replica shapes among which the plan is the best."""
    is_complete: bool = False
    """Whether these are all that the cost model can express, up to steps of 2 % in the number of answers in flight."""
    question: Question | None = None
    held_out_error: float | None = None
    """Relative error of the cost model on measurements that it was not fitted to; the gap does not include it. None:
    unknown."""


def digest(problem: PlanningProblem) -> str:
    """SHA-256 of the whole problem as hex digits, independent of the order of its keys. Uses `vars`, which makes no
    copies, unlike `asdict`."""
    return hashlib.sha256(json.dumps(vars(problem), default=vars, sort_keys=True).encode()).hexdigest()


def proof_of(
    view: View, pool: Sequence[Multipliers], tau_lo_s: float, price_cap: int | None
) -> tuple[tuple[Multipliers, ...], tuple[str, ...]]:
    """Returns the dual prices from `pool` that rule out training gangs at the period `tau_lo_s` and `price_cap`, and
    the names of the gangs that none of them rules out."""
    open_gangs = np.flatnonzero(view.period <= tau_lo_s)
    kept = []
    for prices in reversed(pool):  # the last ones are the tightest
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
    return tuple(kept), by_solver


def certify(view: View, pool: Sequence[Multipliers], tau_lo_s: float, price_cap: int | None, gap: float) -> Certificate:
    """Builds the certificate for the period `tau_lo_s` and `price_cap`, with what `proof_of` takes from `pool`."""
    proof = proof_of(view, pool, tau_lo_s, price_cap)
    solver = f"HiGHS in scipy {scipy.__version__}"
    return Certificate(tau_lo_s, price_cap, max(gap, 0.0), *proof, digest(view.problem), solver)


def distance(certificate: Certificate, tau_s: float, price_per_h: float, *, is_for_price: bool) -> float:
    """Returns how far a plan is above its proven lower bound, as a share of the bound. Compares prices if
    `is_for_price`, otherwise periods."""
    if not is_for_price:
        return max(tau_s / certificate.tau_lo_s - 1, 0.0)
    least = 0 if certificate.price_cap is None else certificate.price_cap + 1
    return max(price_per_h * MICRO / max(least, 1) - 1, 0.0)
