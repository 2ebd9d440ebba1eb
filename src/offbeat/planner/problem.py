"""The planning problem in numbers: offers, columns and demand; the only input of the integer program and its checker.

An *offer* is a class of identical nodes that can be rented. A *column* is one way to use machines, with the speed that
the cost model predicts: a shape of rollout replica on one class, or a training gang on whole nodes of one or several
classes. A plan has a number of replicas of each rollout column and exactly one gang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Offer:
    """Nodes of one class on offer, with their price."""

    name: str
    num_nodes: int
    per_node: int
    node_price_per_h: float
    most_generating: int | None = None
    """Largest number of nodes that may be rented for rollout, besides those that train; None: all of them."""
    least_generating: int = 0
    """Smallest number of rented nodes on which replicas run."""

    def num_free(self, num_training: int) -> int:
        """Number of nodes that may be rented for rollout if `num_training` nodes train."""
        left = self.num_nodes - num_training
        return left if self.most_generating is None else min(left, self.most_generating)


@dataclass(frozen=True)
class RolloutColumn:
    """One shape of rollout replica on one class of nodes, with its speed and delays."""

    name: str
    offer: str
    num_accelerators: int
    """Accelerators of one replica. A replica never crosses nodes; several replicas may share a node."""
    tp: int
    concurrency: int
    """Trajectories in flight in one replica."""
    tokens_per_s: float
    """Tokens per second of one replica; the time for the prefill of new prompts is already deducted."""
    token_s: float
    """Seconds between two tokens of one trajectory."""
    blocking_s: Mapping[str, float]
    """Seconds of generation that a replica loses at each new version, by the class of nodes that publishes the
    version."""
    pp: int = 1
    kv: str = "refill"
    lag_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds from a version's publication until this column's class of nodes has it, by the class that publishes. A
    publishing class that is missing here has a lag of 0. Computing rewards (`Demand.lag_s`) takes additional time."""
    lag_over_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Same as `lag_s`, but for versions that a third class relays. Keys are the publishing class, then the relaying
    class. Holds only lags shorter than the direct one. A class relays only if the plan uses its nodes. Used only with a
    staleness bound above 0."""
    room_bytes: float | None = None
    """Bytes left on each card for training state, if the replica runs on a training gang's nodes: with staleness bound
    0 in turn with training, otherwise on cards that do not train, where it is 0. None for replicas on nodes of their
    own."""

    @property
    def is_home(self) -> bool:
        """Whether replicas run on the gang's own nodes."""
        return self.room_bytes is not None

    def fits_beside(self, gang: Gang) -> bool:
        """Whether the replica's cards have room for the training state that `gang` keeps on them; always True for
        replicas on nodes of their own."""
        return self.room_bytes is None or gang.kept_bytes.get(self.offer, 0.0) <= self.room_bytes

    def lag_from_s(self, root: str, over: Iterable[str] = ()) -> float:
        """Seconds until this column's class has a version published by the class `root`: directly, or through one of
        the relaying classes `over` if that is sooner."""
        ways_s = self.lag_over_s.get(root, {})
        return min([self.lag_s.get(root, 0.0), *(ways_s[name] for name in over if name in ways_s)])


@dataclass(frozen=True)
class Gang:
    """A training gang: whole nodes that train together, with their parallelism and step time."""

    name: str
    nodes: Mapping[str, int]
    """Number of nodes by offer (class of nodes)."""
    root: str
    """Class that publishes the weights."""
    step_s: float
    publish_s: float
    """Seconds that publishing the weights adds to a step."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers: tuple[int, ...] = ()
    """Number of layers of each pipeline stage."""
    batch_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the batch by class, if data parallelism crosses classes; otherwise empty."""
    zero: int = 1
    kept_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of training state on each card between two steps, by class; empty if replicas never share the gang's
    nodes."""

    home_cards: Mapping[str, int] | None = None
    """Cards of the gang's nodes on which replicas may run, by class. None: with staleness bound 0 all of them, in turn
    with training; otherwise none."""

    @property
    def period_s(self) -> float:
        return self.step_s + self.publish_s

    def num_home_cards(self, offer: Offer, bound: int) -> int:
        """Number of cards of the gang's nodes of a class on which replicas may run, with this staleness bound."""
        if self.home_cards is not None:
            return self.home_cards.get(offer.name, 0)
        return 0 if bound else self.nodes.get(offer.name, 0) * offer.per_node


@dataclass(frozen=True)
class Demand:
    """Requirements of one training step."""

    trajectories: int
    tokens: float
    """Tokens generated per step, waste included."""
    bound: int
    """Staleness bound, `max_staleness` in the configuration."""
    queue: float = 0.0
    """Number of finished trajectories that should wait for training, as a buffer. The cap on trajectories in flight is
    lowered by this number."""
    tail_tokens: float = 0.0
    """Length in tokens of a long answer that must end within the age window; 0: no age window.

    The age window is the time in which an answer must end, so that the staleness bound still allows training on it.
    Step k starts k periods after the first step and takes `Gang.period_s`. Then it publishes version k + 1, which
    replicas have one lag later. For one period they start answers with that version. Step k + 1 + `bound` is the last
    that may train on these answers. So the first of these answers has `bound` + 1 periods of time, less the gang's
    period and the lag. The last one has one period less. The age window is the time of the first, less `age_guard`
    periods."""
    age_guard: float = 0.5
    """Number of periods by which the age window is shortened. With 1, the staleness bound holds for every answer of
    `tail_tokens` tokens; with 1/2, only for the average answer of that length."""
    lag_s: float = 0.0
    """Seconds to compute the reward of an answer before it can be trained on; the same for all columns."""
    reward_rate: float | None = None
    """Trajectories per second that the reward pool can score; None: no limit."""
    headroom: float = 0.0
    """Spare capacity that the fastest plan should have, as a share, if this costs neither speed nor money. With 0.1,
    the plan generates 10 % more tokens than demanded and leaves long answers 10 % more time."""


@dataclass(frozen=True)
class PlanningProblem:
    offers: Mapping[str, Offer]
    rollout: tuple[RolloutColumn, ...]
    gangs: tuple[Gang, ...]
    demand: Demand
    fixed_price_per_h: float = 0.0
    """Price of the reward pool, which every plan pays."""

    def gang(self, solution: Solution) -> Gang:
        return next(gang for gang in self.gangs if gang.name == solution.gang)


@dataclass(frozen=True)
class Solution:
    """A plan as counts, before concrete nodes are chosen; keys are the names of the problem's columns and offers."""

    tau_s: float
    """Seconds from one training step to the next (the period)."""
    gang: str
    replicas: Mapping[str, int]
    """Number of replicas by rollout column (replica shape); columns without replicas are left out."""
    nodes: Mapping[str, int]
    """Number of nodes rented for rollout, besides the gang's, by offer (class of nodes); offers without such nodes are
    left out."""


@dataclass(frozen=True)
class Branch:
    """Part of all plans, by which classes generate. An empty branch is all of them."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """State of each class: it generates on none of its rented nodes, on one, on some, or on two or more (many)."""
    at_home: str = ""
    """Training nodes that generate too, in turn (only with staleness bound 0): none, at most one of each class, or many
    of a gang of one class or of both classes of a gang. Empty: any of these."""
