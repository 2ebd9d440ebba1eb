"""How a version reaches every rollout node: a chunked relay along a tree, and how far that is from the best possible.

A node has two ports, one towards its class and one towards all others: what it sends to several nodes shares the port
(a slow hop leaves its rest to the others), and where the link between two classes is shared, all that crosses shares
it. So a version crosses a slow link once, and is spread by those that have it. The rate at a receiver is the least on
its way; receivers pass chunks on as they come.

Between alike nodes the tree is built class by class: the way with the widest narrowest link between classes (Prim),
then a fan-out inside each class, as wide as the arriving rate leaves room for; where it leaves none, two trees that
carry half of the chunks each, and in which nobody passes chunks on twice. Between measured nodes it is built node by
node and, where they are few, improved by hanging subtrees elsewhere.

No schedule beats bytes / (the least max-flow from the root to a receiver), whatever it sends where (Edmonds).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import networkx as nx

from offbeat.plan.cost.sync import CHUNK_BYTES, fan_out, one_tree_s, two_trees_s
from offbeat.plan.inputs.hardware import Link
from offbeat.plan.place.arrival import Senders, arrival_s, hop_rates, shares_in_order
from offbeat.plan.place.nodes import Fabric

SWAP_S = 0.05
"""To point an engine at weights that already lie in its memory: graphs stay, one step boundary is waited for."""
MAX_IMPROVED = 16
"""Receivers up to which a measured tree is improved move by move: a round costs their number cubed."""


class Buffer(StrEnum):
    """Where a receiver keeps a version until it serves it."""

    DEVICE = "device"
    """Beside the weights in use: the change is a swap of pointers."""
    HOST = "host"
    """In the host's memory: generation waits for the copy onto the cards."""
    NONE = "none"
    """Nowhere: generation waits for the whole transfer."""


@dataclass(frozen=True)
class Hop:
    sender: str
    receiver: str
    bytes_per_s: float
    """What this hop gets of the sender's port."""
    share: float = 1.0
    """Of a version's chunks, those that go this way: a half where two senders take turns."""


@dataclass(frozen=True)
class SyncTree:
    root: str
    senders: Senders
    hops: tuple[Hop, ...]
    """Senders before their receivers."""
    chunk_bytes: float
    seconds: float
    """Until the last receiver has all."""
    lower_bound_s: float


def sync_tree(
    fabric: Fabric, root: str, receivers: Iterable[str], num_bytes: float, chunk_bytes: float = CHUNK_BYTES
) -> SyncTree:
    """A tree from `root` to all `receivers`; without receivers it is empty and takes no time."""
    wanted = sorted(set(receivers) - {root}, key=_by_number)
    if not wanted:
        return SyncTree(root, {}, (), chunk_bytes, 0.0, 0.0)
    senders = relay(fabric, root, wanted, num_bytes, chunk_bytes)
    seconds = arrival_s(fabric, senders, num_bytes, chunk_bytes)
    rates = hop_rates(fabric, senders)
    ways = [(senders[name][part], name) for name, part in shares_in_order(senders)]
    hops = tuple(Hop(sender, name, rates[sender, name], 1 / len(senders[name])) for sender, name in ways)
    return SyncTree(
        root, senders, hops, chunk_bytes, max(seconds.values()), lower_bound_s(fabric, root, wanted, num_bytes)
    )


def relay(
    fabric: Fabric, root: str, receivers: Iterable[str], num_bytes: float, chunk_bytes: float = CHUNK_BYTES
) -> Senders:
    """The tree alone: who sends to each receiver."""
    wanted = sorted(set(receivers) - {root}, key=_by_number)
    if not wanted:
        return {}
    if fabric.is_alike:
        return _by_class(fabric, root, wanted, num_bytes, chunk_bytes)
    parents = _by_node(fabric, root, wanted, num_bytes, chunk_bytes)
    return {name: (sender,) for name, sender in parents.items()}


def blocking_s(buffer: Buffer, num_bytes: float, tp: int, host_bytes_per_s: float, transfer_s: float) -> float:
    """How long a replica does not generate when a version arrives; each of its cards loads its part by its own link."""
    if buffer is Buffer.DEVICE:
        return SWAP_S
    return num_bytes / (tp * host_bytes_per_s) if buffer is Buffer.HOST else transfer_s


def lower_bound_s(fabric: Fabric, root: str, receivers: Sequence[str], num_bytes: float) -> float:
    """Bytes over the least max-flow from the root to a receiver; alike receivers of a class are asked for once."""
    names = [root, *(name for name in receivers if name != root)]
    network = _network(fabric, names)
    asked = {fabric.nodes[name].offer if fabric.is_alike else name: name for name in names[1:]}
    flows = [nx.maximum_flow_value(network, root, name) for name in asked.values()]
    return num_bytes / min(flows) if flows else 0.0


def _network(fabric: Fabric, names: Sequence[str]) -> nx.DiGraph:
    """Nodes, their ports out and in, and the links between."""
    network = nx.DiGraph()
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(fabric.nodes[name].offer, []).append(name)
    for name in names:
        for is_near in (True, False):
            rate = fabric.port_bytes_per_s(name, is_near)
            network.add_edge(name, ("out", name, is_near), capacity=rate)
            network.add_edge(("in", name, is_near), name, capacity=rate)
    for one, senders in members.items():
        for other, receivers in members.items():
            if frozenset((one, other)) in fabric.inventory.links:
                _connect(network, fabric, senders, receivers)
    return network


def _connect(network: nx.DiGraph, fabric: Fabric, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """What leaves nodes of one class for another: over one hub where nodes are alike or the link is shared."""
    one, other = fabric.nodes[senders[0]].offer, fabric.nodes[receivers[0]].offer
    link, is_near = fabric.inventory.link(one, other), one == other
    if not (fabric.is_alike or link.is_shared):
        for sender in senders:
            for receiver in receivers:
                if sender != receiver:
                    rate = fabric.bytes_per_s(sender, receiver)
                    network.add_edge(("out", sender, is_near), ("in", receiver, is_near), capacity=rate)
        return
    entry, leave = ("hub", one, other), ("beyond", one, other)
    rate = link.bytes_per_s if fabric.is_alike else max(fabric.bytes_per_s(s, r) for s in senders for r in receivers)
    network.add_edge(entry, leave, **({"capacity": rate} if link.is_shared else {}))
    network.add_edges_from(((("out", sender, is_near), entry) for sender in senders), capacity=rate)
    network.add_edges_from(((leave, ("in", receiver, is_near)) for receiver in receivers), capacity=rate)


def _by_class(fabric: Fabric, root: str, receivers: Sequence[str], num_bytes: float, chunk_bytes: float) -> Senders:
    """One copy into each class over the widest way, then a fan-out inside it."""
    members: dict[str, list[str]] = {}
    for name in receivers:
        members.setdefault(fabric.nodes[name].offer, []).append(name)
    home = fabric.nodes[root].offer
    feeder, arriving = {home: root}, {home: math.inf}
    parents: dict[str, str] = {}
    while missing := members.keys() - feeder.keys():
        ways = []
        for near in feeder:
            users = Counter(parents.values())
            # Whoever sends least to other classes; the root and a class's first receiver come first.
            sender = min([feeder[near], *members.get(near, [])], key=lambda name: users[name])
            for far in missing:
                rate = fabric.bytes_per_s(sender, members[far][0])
                port = fabric.port_bytes_per_s(sender, is_near=False) / (users[sender] + 1)
                ways.append((min(arriving[near], rate, port), near == home, far, sender))
        arriving_rate, _, offer, sender = max(ways)
        feeder[offer], arriving[offer] = members[offer][0], arriving_rate
        parents[members[offer][0]] = sender
    senders: dict[str, tuple[str, ...]] = {name: (sender,) for name, sender in parents.items()}
    for offer, names in sorted(members.items()):
        line = [feeder[offer], *(name for name in names if name != feeder[offer])]
        if len(line) > 1:
            senders |= _within(fabric, line, arriving[offer], num_bytes, chunk_bytes)
    return senders


def _within(fabric: Fabric, line: Sequence[str], arriving: float, num_bytes: float, chunk_bytes: float) -> Senders:
    """From the first of alike nodes to all others: along one tree, or along two that carry half of the chunks each."""
    within = Link(fabric.bytes_per_s(line[0], line[1]), fabric.latency_s(line[0], line[1]))
    if two_trees_s(num_bytes, arriving, within, len(line), chunk_bytes) < one_tree_s(
        num_bytes, arriving, within, len(line), chunk_bytes
    ):
        one, other = line[1:], line[:0:-1]
        # Whoever passes chunks on in one order is at the end of the other: no port carries more than one version.
        heaps = [
            {name: order[(i - 1) // 2] if i else line[0] for i, name in enumerate(order)} for order in (one, other)
        ]
        return {name: (heaps[0][name], heaps[1][name]) for name in one}
    width = fan_out(num_bytes, arriving, within, len(line), chunk_bytes)
    return {name: (line[i // width],) for i, name in enumerate(line[1:])}


def _heap(root: str, names: Sequence[str]) -> dict[str, str]:
    """By name: its sender in a binary tree under the root's only receiver, the first."""
    return {name: names[(i - 1) // 2] if i else root for i, name in enumerate(names)}


def _by_node(
    fabric: Fabric, root: str, receivers: Sequence[str], num_bytes: float, chunk_bytes: float
) -> dict[str, str]:
    """The better of two starts: ports divided among those that they feed already, or taken as wide for each."""
    trees = [_widest_first(fabric, root, receivers, divides) for divides in (True, False)]
    if len(receivers) <= MAX_IMPROVED:
        trees = [_improved(fabric, root, tree, num_bytes, chunk_bytes) for tree in trees]
    return min(trees, key=lambda tree: _cost(fabric, tree, num_bytes, chunk_bytes))


def _widest_first(fabric: Fabric, root: str, receivers: Sequence[str], divides: bool) -> dict[str, str]:
    """The next receiver is always the one that can be reached at the best rate."""
    parents: dict[str, str] = {}
    arriving, users = {root: math.inf}, Counter[tuple[str, bool]]()
    missing = set(receivers)
    while missing:
        ways = []
        for near, rate in arriving.items():
            for far in missing:
                parts = users[near, fabric.is_near(near, far)] + 1 if divides else 1
                ways.append((min(rate, fabric.bytes_per_s(near, far) / parts), far, near))
        rate, far, near = max(ways)
        parents[far], arriving[far] = near, rate
        users[near, fabric.is_near(near, far)] += 1
        missing.remove(far)
    return parents


def _improved(
    fabric: Fabric, root: str, parents: Mapping[str, str], num_bytes: float, chunk_bytes: float
) -> dict[str, str]:
    """Hangs a subtree elsewhere as long as that brings the last, or all others, forward."""
    best = dict(parents)
    best_s = _cost(fabric, best, num_bytes, chunk_bytes)
    while True:
        moves = [
            {**best, name: near}
            for name in best
            for near in [root, *best]
            if near != best[name] and name not in _way(best, near)
        ]
        costs = [_cost(fabric, move, num_bytes, chunk_bytes) for move in moves]
        if not costs or min(costs) >= best_s:
            return best
        best_s = min(costs)
        best = moves[costs.index(best_s)]


def _cost(fabric: Fabric, parents: Mapping[str, str], num_bytes: float, chunk_bytes: float) -> tuple[float, float]:
    """When the last receiver has all, then when they have all on average: a plateau of the first has a way down."""
    senders = {name: (sender,) for name, sender in parents.items()}
    seconds = arrival_s(fabric, senders, num_bytes, chunk_bytes).values()
    return round(max(seconds), 9), round(sum(seconds), 9)


def _way(parents: Mapping[str, str], name: str) -> list[str]:
    """From a node up to the root."""
    way = [name]
    while way[-1] in parents:
        way.append(parents[way[-1]])
    return way


def _by_number(name: str) -> tuple[str, int]:
    offer, _, number = name.rpartition("-")
    return offer, int(number)
