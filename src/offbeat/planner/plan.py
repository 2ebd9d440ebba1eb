"""A plan as data: the nodes to rent, the use of each card, the proof and the limits.

`from_json` is the exact inverse of `to_json`: floats keep every digit, so a saved plan can be checked exactly.
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
    """Period, throughput and price of a step."""

    tau_s: float
    """Seconds from one step to the next (the period), on the chosen nodes and links."""
    tau_lo_s: float | None
    """Lower bound on the period of any plan within the budget, in seconds; None if the user asked for a throughput."""
    tokens_per_s: float
    """Tokens generated per second, waste included."""
    price_per_h: float
    price_lo_per_h: float | None
    """Lower bound on the price per hour of any plan with this period; None if the user asked for no throughput."""
    price_per_million_tokens: float


@dataclass(frozen=True)
class Training:
    """The training gang, placed on its cards."""

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
    """Time of a training step on the chosen nodes."""
    publish_s: float
    stages: tuple[tuple[Group, ...], ...]
    """Cards of each tensor-parallel group, by pipeline stage, in the order of the stage's gradient ring."""
    price_per_million_tokens: float
    why: str
    rate_error: float | None = None
    """Mean relative error of the cost model on held-out training steps, on the worst of the gang's accelerators; None
    if one of them was never measured."""


@dataclass(frozen=True)
class Pool:
    """All rollout replicas of one shape on one class."""

    column: str
    offer: str
    num_replicas: int
    tp: int
    pp: int
    concurrency: int
    """Largest number of trajectories in flight in one replica."""
    weight: float
    """Share of new work that one replica of this pool receives."""
    kv: str
    tokens_per_s: float
    """Tokens per second of one replica while it generates."""
    token_s: float
    blocking_s: float
    """Seconds of generation that a replica loses at each new version. With staleness bound 0, where generation waits
    for training, this includes the time for rewards, training and the transfer of the version."""
    places: tuple[Group, ...]
    price_per_million_tokens: float
    """Price of a million generated tokens; 0 on nodes of the training gang, whose price counts as training."""
    why: str
    shares_gang: bool = False
    """Whether the pool runs on the gang's nodes."""
    rate_error: float | None = None
    """Mean relative error of the cost model on held-out decode steps on this accelerator; None: never measured."""
    beside: bool = False
    """Whether it runs on cards of these nodes that do not train. Otherwise it generates while they do not train."""


@dataclass(frozen=True)
class Sync:
    """Path of a new version of the weights to the rollout nodes."""

    root: str
    num_bytes: float
    hops: tuple[Hop, ...]
    chunk_bytes: float
    seconds: float
    lower_bound_s: float
    """Lower bound on the time of any schedule that sends the version."""


@dataclass(frozen=True)
class Staleness:
    bound: int
    age_guard: float
    in_flight: int
    in_flight_cap: int
    mean_age: float
    """Expected mean staleness of the training data, in versions."""
    tail_tokens: float
    tail_share: float
    """Share of answers that are longer than `tail_tokens`. These continue over several versions."""


@dataclass(frozen=True)
class Placement:
    """Assumed step time and lags (over the best links), lags on the chosen nodes, and the plan's gap."""

    assumed_step_s: float
    """Seconds of the gang's step over the best links. On the chosen nodes it takes `training.step_s`."""
    assumed_lags_s: Mapping[str, float]
    """Seconds from a version's publication until all nodes of a class have it, over the best links; by rollout
    class."""
    lags_s: Mapping[str, float]
    """Same as `assumed_lags_s`, but over the chosen links if these are slower."""
    gap: float | None
    """(period on the chosen nodes - lower bound) / lower bound; None if the user asked for a throughput."""


@dataclass(frozen=True)
class Plan:
    model: str
    budget: float | None
    """$/h that the user asked for; None: no limit."""
    throughput: float | None
    """Tokens/s that the user asked for; None: the fastest plan was sought."""
    rent: Mapping[str, int]
    """Number of nodes by class, for training and rollout together."""
    free: tuple[str, ...]
    """Classes of `rent` that are owned or cost nothing."""
    limit: str
    """The constraint that limits the plan, as a clause such as "the reward pool limits it"."""
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
    takes_turns: bool = False
    """Whether the plan is the best of those that train and generate in turn, as with staleness bound 0, because the
    machines are too few to do both at a time."""


LARGEST = 1e15
"""Largest number in a plan. No count, rate or number of bytes comes near it."""


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def to_json(plan: Plan) -> str:
    return json.dumps(_adapter().dump_python(plan, mode="json"), indent=1)


def from_json(text: str, where: str = "plan") -> Plan:
    """Parses the output of `to_json`; `where` names the text in errors."""
    try:
        plan = _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        why = f"{key}: {first['msg']}" if key else first["msg"]
        raise UserError(f"{where} is not a plan: {why}; give the output of offbeat plan --json") from None
    if key := _infinite(json.loads(text)):
        raise UserError(f"{where} is not a plan: {key} is no finite number; give the output of offbeat plan --json")
    return plan


def _infinite(value: object, path: str = "") -> str:
    """Returns the dotted name of the first number that is infinite, undefined, or too large to count with; empty if
    there is none."""
    if isinstance(value, dict | list):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, each in named if (found := _infinite(each, f"{path}.{key}".lstrip(".")))), "")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return path if is_number and not abs(value) <= LARGEST else ""  # type: ignore[arg-type]
