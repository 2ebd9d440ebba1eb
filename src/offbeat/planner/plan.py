"""A plan as data: what to rent, which cards do what, its proof and its limits.

`to_json` and `from_json` are each other's inverse: floats keep every digit, so a saved plan can be checked exactly.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from offbeat.errors import UserError
from offbeat.planner.place.islands import Group
from offbeat.planner.place.sync_tree import Hop
from offbeat.planner.problem import Solution
from offbeat.planner.solve.certificate import Certificate


@dataclass(frozen=True)
class PlanStep:
    """Period, yield and price of a step."""

    tau_s: float
    """Period on the chosen nodes and links."""
    tau_lo_s: float | None
    """Lower bound on the period of any plan within the budget; None if a throughput was asked for."""
    tokens_per_s: float
    """Tokens generated, waste included."""
    price_per_h: float
    price_lo_per_h: float | None
    """Lower bound on the price of a plan with this period; None unless the price was minimised."""
    price_per_million_tokens: float


@dataclass(frozen=True)
class Training:
    """The gang, on its cards."""

    nodes: Mapping[str, int]
    root: str
    """Class that publishes the weights."""
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...]
    batch_shares: Mapping[str, float]
    zero: int
    step_s: float
    """Time of a step on its nodes."""
    publish_s: float
    stages: tuple[tuple[Group, ...], ...]
    """By pipeline stage: the cards of each tensor-parallel group, in ring order."""
    price_per_million_tokens: float
    why: str


@dataclass(frozen=True)
class Pool:
    """Rollout replicas of one shape on one class."""

    column: str
    offer: str
    num_replicas: int
    tp: int
    pp: int
    concurrency: int
    """Largest number of trajectories in flight in a replica."""
    weight: float
    """Share of new work for one replica of this pool."""
    kv: str
    tokens_per_s: float
    """Tokens of one replica, between two versions."""
    token_s: float
    blocking_s: float
    """Generation time lost at each version; with bound 0 it includes training."""
    places: tuple[Group, ...]
    price_per_million_tokens: float
    """0 on the gang's nodes, which count as training."""
    why: str
    shares_gang: bool = False
    """Whether it is on the gang's nodes and generates while they do not train."""


@dataclass(frozen=True)
class Sync:
    """Path of a version to the rollout nodes."""

    root: str
    num_bytes: float
    hops: tuple[Hop, ...]
    chunk_bytes: float
    seconds: float
    lower_bound_s: float
    """Lower bound on the time of any way to send it."""


@dataclass(frozen=True)
class Staleness:
    bound: int
    age_guard: float
    in_flight: int
    in_flight_cap: int
    mean_age: float
    """Expected, in versions."""
    tail_tokens: float
    tail_share: float
    """Share of answers that are longer and continue over versions."""


@dataclass(frozen=True)
class Placement:
    """Cost of the chosen nodes and links compared with the best ones, which the columns assume."""

    assumed_step_s: float
    """Step of the gang over the best links; on its nodes it takes `training.step_s`."""
    assumed_lags_s: Mapping[str, float]
    """By rollout class: time from a version's publication until all its nodes have it."""
    lags_s: Mapping[str, float]
    """The same on the chosen links, if longer."""
    gap: float | None
    """(placed period - lower bound) / lower bound; None if a throughput was asked for."""


@dataclass(frozen=True)
class Plan:
    model: str
    budget: float | None
    """$/h, as asked."""
    throughput: float | None
    """Tokens/s, as asked."""
    rent: Mapping[str, int]
    """Nodes by class, for training and rollout."""
    limit: str
    """The constraint that limits the plan."""
    step: PlanStep
    training: Training
    rollout: tuple[Pool, ...]
    sync: Sync
    staleness: Staleness
    placement: Placement
    solution: Solution
    certificate: Certificate
    assumptions: tuple[str, ...]
    note: str = ""


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def to_json(plan: Plan) -> str:
    return json.dumps(_adapter().dump_python(plan, mode="json"), indent=1)


def from_json(text: str, where: str = "plan") -> Plan:
    """Reads the output of `to_json`; `where` names it in errors."""
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        why = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"{where}: not a plan: {why}; offbeat plan --json writes one") from None
