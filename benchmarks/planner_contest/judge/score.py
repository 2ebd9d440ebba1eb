"""Tokens per second of a plan, by a deterministic simulation of its steps with a continuous flow of trajectories.

The trainer takes a batch when one is ready, trains it and publishes a version. Replicas generate all the time, except
while they switch versions or while a whole batch is ready, because more answers would only grow old. Running
trajectories, ready ones and the batch in training never exceed bound + 1 batches together. If a plan wants more in
flight, slots stay empty.

The staleness bound can be kept in two ways, and a score has both. *Paced*: steps are so far apart that an answer of the
tail's length, begun with a version, is trained within the bound; only longer answers continue over versions. Steps
start a period apart. A version is available once its step has trained and published, and answers begun with it may be
trained up to the step that starts bound + 1 periods after its own. *Masked*: steps are as fast as possible, and tokens
that would be older than the bound when trained do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.planner_contest.judge import decode, train
from benchmarks.planner_contest.judge.plan import Figures, Plan, Replicas, Sync
from benchmarks.planner_contest.judge.shape import weight_bytes
from offbeat.planner.inputs.hardware import Accelerator, Inventory
from offbeat.planner.inputs.workload import LengthStatistics, Workload

NUM_STEPS = 40
NUM_WARM = 15
"""Number of first steps that are left out, because the queue has not settled."""
SLICES = 64
"""Number of time slices per period, so that the flow follows the changing queue."""
NUM_QUANTILES = 64
HALF = 0.5
"""Periods lost on average because an answer begins at any time within the life of its version."""


@dataclass(frozen=True)
class Score:
    tokens_per_s: float
    """Tokens generated and trained per second if steps are paced so that long answers keep the bound."""
    masked_tokens_per_s: float
    """Tokens per second if steps are not paced and tokens that are too old are left out."""
    period_s: float
    """Seconds per step without pacing."""
    train_s: float
    masked_share: float
    """Share of tokens that are too old to train on."""


@dataclass(frozen=True)
class _Pool:
    offer: str
    card: Accelerator
    tp: int
    slots: float
    count: int
    blocked_s: float


def score(inventory: Inventory, workload: Workload, plan: Plan, figures: Figures | None = None) -> Score:
    figures = figures or Figures()
    assert workload.bound >= 1, "the judge knows no plan whose stages alternate"
    publish_s = _publish_s(inventory, workload, plan)
    train_s = train.step_s(inventory, workload, plan.gang, figures)
    pools = [_pool(inventory, workload, plan, one, figures) for one in plan.replicas if one.count]
    if _flow(workload, pools, [1.0] * len(pools), figures) <= 0:
        return Score(0.0, 0.0, math.inf, train_s, 0.0)
    period_s, mean_ready = _simulate(workload, pools, train_s + publish_s, figures)
    masked = _masked_share(workload, pools, period_s, mean_ready, figures)
    tokens = workload.trajectories_per_step * workload.answer.mean
    ready_s = train_s + publish_s + _tail_s(inventory, workload, plan, pools, figures)
    paced_s = max(period_s, ready_s / (workload.bound + 1 - HALF))
    return Score(tokens / paced_s, tokens * (1 - masked) / period_s, period_s, train_s, masked)


def _tail_s(inventory: Inventory, workload: Workload, plan: Plan, pools: list[_Pool], figures: Figures) -> float:
    """Seconds from a version's publication until an answer of the tail's length is complete in the slowest pool."""
    lags_s = dict.fromkeys((pool.offer for pool in pools), 0.0)
    if plan.sync is Sync.RELAY:
        rates = relay_bytes_per_s(inventory, plan)
        lags_s = {name: weight_bytes(workload.model) / rates[name] for name in lags_s}
    return max(
        lags_s[pool.offer] + workload.answer.tail * _token_s(workload, pool, figures) for pool in pools if pool.slots
    )


def relay_bytes_per_s(inventory: Inventory, plan: Plan) -> dict[str, float]:
    """Returns by class the rate at which a version reaches it: that of the slowest link on the fastest path from the
    gang over the plan's classes, where a node divides its port among those to whom it sends: the first nodes of other
    classes, and one more node of its own class if that has one."""
    generating = {name: _num_generating(inventory, plan, name) for name in inventory.classes}
    rates = {name: _within(inventory, name) for name in plan.gang.nodes}
    missing = {one.offer for one in plan.replicas if one.count} - set(rates)
    parents: dict[str, str] = {}
    while missing:
        rate, name, parent = max(
            (min(rates[near], inventory.link(near, far).bytes_per_s), far, near) for near in rates for far in missing
        )
        rates[name], parents[name] = rate, parent
        missing.remove(name)
    sends = {name: sum(parent == name for parent in parents.values()) for name in rates}
    for name in sends:
        sends[name] += generating[name] > (0 if name in plan.gang.nodes else 1)
    placed = {}
    for name in rates:
        spread = _within(inventory, name) / sends[name] if generating[name] > 1 else math.inf
        at, reached = name, min(spread, _within(inventory, name)) if name in plan.gang.nodes else spread
        while at in parents:
            link = inventory.link(at, parents[at]).bytes_per_s
            reached, at = min(reached, link / sends[parents[at]]), parents[at]
        placed[name] = reached
    return placed


def _within(inventory: Inventory, name: str) -> float:
    """Rate between two nodes of a class; infinite for a class of one node without such a link."""
    link = inventory.links.get(frozenset((name,)))
    return link.bytes_per_s if link is not None else math.inf


def _num_generating(inventory: Inventory, plan: Plan, name: str) -> int:
    cards = sum(one.count * one.tp for one in plan.replicas if one.offer == name)
    return -(-cards // inventory.classes[name].per_node)


def _token_s(workload: Workload, pool: _Pool, figures: Figures) -> float:
    """Seconds between two tokens of a trajectory while the replica generates."""
    return decode.step_s(pool.card, workload, pool.tp, pool.slots, figures)


def update_s(inventory: Inventory, workload: Workload, plan: Plan) -> float:
    """Seconds to send the plan's copies of the weights, one after the other, over the slowest link between gang and
    rollouts."""
    pairs = [(near, one.offer) for near in plan.gang.nodes for one in plan.replicas if one.count]
    slowest = min(inventory.link(near, far).bytes_per_s for near, far in pairs)
    return plan.copies * weight_bytes(workload.model) / slowest


def _publish_s(inventory: Inventory, workload: Workload, plan: Plan) -> float:
    """Seconds that publishing a version adds to the trainer's period."""
    if plan.sync is Sync.BLOCKING:
        return update_s(inventory, workload, plan)
    root = inventory.classes[max(plan.gang.nodes, key=lambda name: plan.gang.nodes[name])]
    return weight_bytes(workload.model) / (root.per_node * root.accelerator.host_bytes_per_s)


def _pool(inventory: Inventory, workload: Workload, plan: Plan, one: Replicas, figures: Figures) -> _Pool:
    card = inventory.classes[one.offer].accelerator
    room = decode.room(card, workload, one.tp, figures)
    slots = min(one.concurrency, room) * figures.busy if room >= 1 else 0.0
    stop_s = figures.swap_s
    if plan.sync is Sync.BLOCKING:
        stop_s = update_s(inventory, workload, plan)
    else:
        weights = weight_bytes(workload.model) / one.tp
        if weights > (1 - slots / figures.busy / max(room, 1)) * (figures.memory_share * card.memory_bytes - weights):
            stop_s += weights / card.host_bytes_per_s  # no room for a second set beside the first
    refill_s = decode.refill_s(card, workload, one.tp, slots, figures)
    return _Pool(one.offer, card, one.tp, slots, one.count, stop_s + refill_s)


def _flow(workload: Workload, pools: list[_Pool], shares: list[float], figures: Figures) -> float:
    """Trajectories per second if the share `shares` of each pool's slots is in use."""
    tokens = sum(
        pool.count * decode.tokens_per_s(pool.card, workload, pool.tp, pool.slots * share, figures)
        for pool, share in zip(pools, shares, strict=True)
    )
    rate = tokens / workload.answer.mean * (1 - workload.waste_share)
    reward = workload.reward
    return min(rate, reward.num_slots / reward.seconds) if reward and reward.seconds > 0 else rate


def _simulate(workload: Workload, pools: list[_Pool], busy_s: float, figures: Figures) -> tuple[float, float]:
    """Returns the mean period and the mean number of ready trajectories."""
    batch, slots = workload.trajectories_per_step, sum(pool.slots * pool.count for pool in pools)
    full = _flow(workload, pools, [1.0] * len(pools), figures)
    slice_s = max(busy_s, batch / full) / SLICES
    now_s = ready = area = 0.0
    free_at_s, warm_s = 0.0, 0.0
    is_training = False
    awake_s = [0.0] * len(pools)
    num_trained = 0
    while num_trained < NUM_STEPS:
        if is_training and now_s >= free_at_s - 1e-9:
            is_training = False
            num_trained += 1
            awake_s = [now_s + pool.blocked_s for pool in pools]
            if num_trained == NUM_WARM:
                warm_s, area = now_s, 0.0
        if not is_training and ready >= batch * (1 - 1e-9):
            is_training, free_at_s = True, now_s + busy_s
            ready -= batch
        places = (workload.bound + (0 if is_training else 1)) * batch
        share = min(1.0, max(0.0, places - ready) / slots) if ready < batch else 0.0
        rate = _flow(workload, pools, [share if at <= now_s + 1e-12 else 0.0 for at in awake_s], figures)
        ends = [now_s + slice_s, *(at for at in awake_s if at > now_s + 1e-12)]
        if is_training:
            ends.append(free_at_s)
        elif rate > 0:
            ends.append(now_s + max(batch - ready, 0.0) / rate)
        spent_s = max(min(ends) - now_s, 1e-9)
        area += (ready + rate * spent_s / 2) * spent_s
        ready += rate * spent_s
        now_s += spent_s
    return (now_s - warm_s) / (NUM_STEPS - NUM_WARM), area / (now_s - warm_s)


def _masked_share(
    workload: Workload, pools: list[_Pool], period_s: float, mean_ready: float, figures: Figures
) -> float:
    """Share of generated tokens that are older than the bound allows, after a trajectory's wait for training.

    By Little's law the wait is half a period if batches fill just in time, and up to a whole period if they lie ready.
    """
    window_s = (workload.bound - mean_ready / workload.trajectories_per_step) * period_s
    masked = total = 0.0
    for pool in pools:
        rate = pool.count * decode.tokens_per_s(pool.card, workload, pool.tp, pool.slots, figures)
        token_s = pool.slots / (rate / pool.count) * period_s / max(period_s - pool.blocked_s, 1e-9) if rate else 0.0
        for length in quantiles(workload.answer):
            total += rate * length
            masked += rate * max(0.0, length - max(window_s, 0.0) / token_s) if token_s else 0.0
    return masked / total


def quantiles(lengths: LengthStatistics) -> list[float]:
    """Returns lengths at even quantiles of the log-normal distribution with this mean and mean square, cut at the
    longest."""
    variance = math.log(max(lengths.mean_square / lengths.mean**2, 1.0))
    if variance == 0:
        return [lengths.mean]
    law = NormalDist(math.log(lengths.mean) - variance / 2, math.sqrt(variance))
    return [min(math.exp(law.inv_cdf((i + 0.5) / NUM_QUANTILES)), lengths.longest) for i in range(NUM_QUANTILES)]
