"""A plan as it is kept, read and run: what to rent, who does what on which cards, and what proves and limits it.

`to_json` and `from_json` are each other's inverse: floats keep every digit, so a saved plan can be checked exactly.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from offbeat.errors import UserError
from offbeat.plan.place.islands import Group
from offbeat.plan.place.sync_tree import Hop
from offbeat.plan.solution import Solution
from offbeat.plan.solve.certificate import Certificate


@dataclass(frozen=True)
class Step:
    """What a step takes and yields."""

    tau_s: float
    """On the nodes and links that were chosen."""
    tau_lo_s: float | None
    """No plan within the budget has a shorter period, whatever its nodes; None where the period was given."""
    tokens_per_s: float
    """Generated; waste included."""
    price_per_h: float
    price_lo_per_h: float | None
    """No plan of this period costs less; None where the price was not what was sought."""
    price_per_million_tokens: float


@dataclass(frozen=True)
class Training:
    """The gang, on its cards."""

    nodes: Mapping[str, int]
    root: str
    """The class that publishes the weights."""
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...]
    batch_shares: Mapping[str, float]
    zero: int
    step_s: float
    """On its nodes."""
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
    """The cap on what a replica has in flight."""
    weight: float
    """Of new work, what one replica of this pool gets."""
    kv: str
    tokens_per_s: float
    """Of one replica, between two versions."""
    token_s: float
    blocking_s: float
    """Of generation, lost at each version; with bound 0 that is training, too."""
    places: tuple[Group, ...]
    price_per_million_tokens: float
    """0 on the gang's nodes, which training pays for."""
    why: str
    shares_gang: bool = False
    """It stands on the gang's nodes, and generates while these do not train."""


@dataclass(frozen=True)
class Sync:
    """How a version reaches the rollout nodes."""

    root: str
    num_bytes: float
    hops: tuple[Hop, ...]
    chunk_bytes: float
    seconds: float
    lower_bound_s: float
    """No way of sending is faster."""


@dataclass(frozen=True)
class Staleness:
    bound: int
    age_guard: float
    in_flight: int
    in_flight_cap: int
    mean_age: float
    """Versions, expected."""
    tail_tokens: float
    tail_share: float
    """Of answers, those that are longer and are carried on over versions."""


@dataclass(frozen=True)
class Placement:
    """What the nodes and links that were chosen cost over the best ones, which the columns go by."""

    assumed_step_s: float
    """Of the gang, over the best links; what it takes on its nodes is `training.step_s`."""
    assumed_lags_s: Mapping[str, float]
    """By class that rolls out: from a version's publication until all its nodes have it."""
    lags_s: Mapping[str, float]
    """The same by the sync tree, where that takes longer."""
    gap: float | None
    """(placed period - lower bound) / lower bound; None where the period was given."""


@dataclass(frozen=True)
class Plan:
    model: str
    budget: float | None
    """As asked, $/h."""
    throughput: float | None
    """As asked, tokens/s."""
    rent: Mapping[str, int]
    """Nodes by class, for both sides."""
    limit: str
    """What keeps it from being better."""
    step: Step
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
    """A plan that `to_json` wrote; `where` names it in errors."""
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        told = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"{where}: is no plan: {told}; offbeat plan --json writes one") from None
