"""The sync tree, which relays a version of the weights in chunks to every rollout node, and a lower bound on its time.

A hop is a transfer from one node to another. A node has two ports, one to its class and one to all other classes. Hops
that leave by the same port divide its rate; the rate that a slow hop cannot use goes to the others. Hops over a shared
link between two classes divide the link. Receivers pass each chunk on at once, so a node receives the version at the
lowest rate on its path from the root, the node that publishes.

If nodes are interchangeable, the tree is built class by class: first the widest paths between classes (Prim), then one
tree or two inside each class. If links between nodes were measured, the tree is built node by node and, if there are
few nodes, improved by moving subtrees. No schedule takes less time than the version's bytes divided by the smallest
max-flow from the root to a receiver (Edmonds).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

import networkx as nx

from offbeat.planner.cost.sync_time import CHUNK_BYTES, fan_out, one_tree_s, two_trees_s
from offbeat.planner.place.nodes import NodeFabric, by_class, class_and_number

Senders = Mapping[str, tuple[str, ...]]
"""Senders of each receiver, by the receiver's name. If a receiver has several senders, the n-th sends the n-th share of
all chunks. A sender that itself has as many senders needs only its own n-th share for this; any other sender needs all
shares."""


def hops_of(senders: Senders) -> Iterator[tuple[str, str]]:
    """Yields all pairs (sender, receiver)."""
    return ((sender, receiver) for receiver, several in senders.items() for sender in several)


def hop_rates(fabric: NodeFabric, senders: Senders) -> dict[tuple[str, str], float]:
    """Bytes per second of every hop (sender, receiver), after shared links and ports are divided among hops."""
    hops = list(hops_of(senders))
    crossings = Counter((fabric.nodes[one].offer, fabric.nodes[other].offer) for one, other in hops)
    ports: dict[tuple[str, bool], dict[str, float]] = {}
    for sender, receiver in hops:
        ends = fabric.nodes[sender].offer, fabric.nodes[receiver].offer
        users = crossings[ends] if fabric.link(sender, receiver).is_shared else 1
        port = ports.setdefault((sender, fabric.is_near(sender, receiver)), {})
        port[receiver] = fabric.bytes_per_s(sender, receiver) / users
    return {
        (sender, receiver): rate
        for (sender, is_near), limits in ports.items()
        for receiver, rate in _divided(limits, fabric.port_bytes_per_s(sender, is_near)).items()
    }


def _divided(limits: Mapping[str, float], total: float) -> dict[str, float]:
    """Divides a port's rate `total` evenly among the receivers in `limits`, but gives none more than its limit."""
    shares, left = {}, total
    for i, (name, limit) in enumerate(sorted(limits.items(), key=lambda item: (item[1], item[0]))):
        shares[name] = min(limit, left / (len(limits) - i))
        left -= shares[name]
    return shares


def arrival_s(
    fabric: NodeFabric, senders: Senders, num_bytes: float, chunk_bytes: float = CHUNK_BYTES
) -> dict[str, float]:
    """Returns the seconds until each node has the whole version. This is the time for all bytes at the lowest rate on
    the path from the root, plus the time for one chunk and the latency of each hop on that path."""
    rates = hop_rates(fabric, senders)
    least: dict[tuple[str, int], float] = {}
    """Rate in bytes/s, by node and share of chunks, at which the whole version would arrive if every share were as fast
    as this one."""
    delay_s: dict[tuple[str, int], float] = {}
    for name, part in shares_in_order(senders):
        several = senders[name]
        before, rate = _held(senders, name, part), rates[several[part], name]
        least[name, part] = min([rate * len(several), *(least[each] for each in before if each in least)])
        delay_s[name, part] = max((delay_s.get(each, 0.0) for each in before), default=0.0)
        delay_s[name, part] += chunk_bytes / rate + fabric.link(several[part], name).latency_s
    arrived_s = dict.fromkeys(senders, 0.0)
    for (name, part), rate in least.items():
        # The delay already includes the first chunk of each sender.
        rest = max(num_bytes - len(senders[name]) * chunk_bytes, 0.0)
        arrived_s[name] = max(arrived_s[name], rest / rate + delay_s[name, part])
    return arrived_s


def shares_in_order(senders: Senders) -> list[tuple[str, int]]:
    """Returns every transfer as (receiver, index of the share of chunks that it receives), ordered so that a node
    receives a share before it sends that share on."""
    shares = ((name, part) for name, several in senders.items() for part in range(len(several)))
    needs = {share: _held(senders, *share) for share in shares}
    return [share for share in TopologicalSorter(needs).static_order() if share in needs]


def _held(senders: Senders, name: str, part: int) -> list[tuple[str, int]]:
    """Returns the transfers, as (receiver, index of share), that must reach the sender `senders[name][part]` before it
    can send share `part` on. If the sender has as many senders as `name`, this is only its own share `part`; otherwise
    it is all its shares."""
    sender = senders[name][part]
    num_parts = len(senders.get(sender, ())) or 1
    is_same = len(senders[name]) == num_parts > 1
    return [(sender, part)] if is_same else [(sender, each) for each in range(num_parts)]


MAX_IMPROVED = 16
"""Largest number of receivers for which a tree over measured links is improved. The cost of each round of improvement
grows with the cube of this number."""


@dataclass(frozen=True)
class Hop:
    sender: str
    receiver: str
    bytes_per_s: float
    """Rate after the sender's port is divided among its hops."""
    share: float = 1.0
    """Share of a version's chunks that this hop carries: one half if two senders take turns."""


@dataclass(frozen=True)
class SyncTree:
    root: str
    senders: Senders
    hops: tuple[Hop, ...]
    """All hops, ordered so that a node receives a share of the chunks before it sends that share."""
    seconds: float
    """Time until the last receiver has the whole version."""
    lower_bound_s: float


def sync_tree(fabric: NodeFabric, root: str, receivers: Iterable[str], num_bytes: float) -> SyncTree:
    """Builds the tree that sends a version from `root` to all `receivers`; an empty tree if there are none."""
    senders = relay(fabric, root, receivers, num_bytes)
    if not senders:
        return SyncTree(root, {}, (), 0.0, 0.0)
    seconds = max(arrival_s(fabric, senders, num_bytes).values())
    rates = hop_rates(fabric, senders)
    ways = [(senders[name][part], name) for name, part in shares_in_order(senders)]
    hops = tuple(Hop(sender, name, rates[sender, name], 1 / len(senders[name])) for sender, name in ways)
    return SyncTree(root, senders, hops, seconds, lower_bound_s(fabric, root, senders, num_bytes))


def relay(fabric: NodeFabric, root: str, receivers: Iterable[str], num_bytes: float) -> Senders:
    """Chooses the nodes that send a version to each of `receivers`; the first copy comes from `root`."""
    wanted = sorted(set(receivers) - {root}, key=class_and_number)
    if not wanted:
        return {}
    if fabric.is_alike:
        return _by_class(fabric, root, wanted, num_bytes)
    return {name: (sender,) for name, sender in _by_node(fabric, root, wanted, num_bytes).items()}


def lower_bound_s(fabric: NodeFabric, root: str, receivers: Iterable[str], num_bytes: float) -> float:
    """Lower bound on the seconds until all receivers have the version, for any schedule: bytes divided by the smallest
    max-flow from the root to a receiver. Only one of several interchangeable receivers is examined."""
    names = sorted(receivers, key=class_and_number)
    network = _network(fabric, [root, *names])
    asked = {fabric.nodes[name].offer if fabric.is_alike else name: name for name in names}
    return num_bytes / min(nx.maximum_flow_value(network, root, name) for name in asked.values())


def _network(fabric: NodeFabric, names: Sequence[str]) -> nx.DiGraph:
    """Builds the network for `lower_bound_s`: nodes, their sending and receiving ports, and links, in bytes/s."""
    network, members = nx.DiGraph(), by_class(fabric, names)
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


def _connect(network: nx.DiGraph, fabric: NodeFabric, senders: Sequence[str], receivers: Sequence[str]) -> None:
    """Adds to `network` the links from `senders`, nodes of one class, to `receivers`, nodes of one class: an edge per
    pair of nodes, or a common hub if nodes are interchangeable or share one link."""
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


def _by_class(fabric: NodeFabric, root: str, receivers: Sequence[str], num_bytes: float) -> Senders:
    """Chooses the senders of each receiver if nodes of a class are interchangeable. The version enters each class of
    nodes once, over the widest path from `root`, and then spreads from node to node inside the class."""
    members, home = by_class(fabric, receivers), fabric.nodes[root].offer
    feeder, arriving = {home: root}, {home: math.inf}
    parents: dict[str, str] = {}
    while missing := members.keys() - feeder.keys():
        ways = []
        for near in feeder:
            users = Counter(parents.values())
            # The node with the fewest hops to other classes; ties go to the node that feeds its class.
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
            senders |= _within(fabric, line, arriving[offer], num_bytes)
    return senders


def _within(fabric: NodeFabric, line: Sequence[str], arriving: float, num_bytes: float) -> Senders:
    """Chooses the senders of the nodes in `line`, all of one class. The first gets the version at `arriving` bytes/s;
    it spreads to the others along one tree or, if faster, two trees with half of the chunks each."""
    transfer = num_bytes, arriving, fabric.link(line[0], line[1]), len(line)
    if two_trees_s(*transfer) < one_tree_s(*transfer):
        # An inner node of one tree is a leaf of the other: no port carries more than one version.
        one, other = (
            {name: order[(i - 1) // 2] if i else line[0] for i, name in enumerate(order)}
            for order in (line[1:], line[:0:-1])
        )
        return {name: (one[name], other[name]) for name in one}
    width = fan_out(*transfer)
    return {name: (line[i // width],) for i, name in enumerate(line[1:])}


def _by_node(fabric: NodeFabric, root: str, receivers: Sequence[str], num_bytes: float) -> dict[str, str]:
    """Returns the sender of each receiver if links between nodes were measured. Builds two trees, one by rates divided
    among a node's hops and one by undivided rates, improves both if the nodes are few, and returns the faster tree."""
    trees = [_widest_first(fabric, root, receivers, divides) for divides in (True, False)]
    if len(receivers) <= MAX_IMPROVED:
        trees = [_improved(fabric, root, tree, num_bytes) for tree in trees]
    return min(trees, key=lambda tree: _cost(fabric, tree, num_bytes))


def _widest_first(fabric: NodeFabric, root: str, receivers: Sequence[str], divides: bool) -> dict[str, str]:
    """Builds a tree (sender by receiver) by always adding the receiver that can be reached at the highest rate. With
    `divides`, a sender's rate is divided among its receivers."""
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


def _improved(fabric: NodeFabric, root: str, best: dict[str, str], num_bytes: float) -> dict[str, str]:
    """Moves subtrees of `best` (sender by receiver) to other senders as long as that lowers `_cost`."""
    best_s = _cost(fabric, best, num_bytes)
    while True:
        pairs = ((name, near) for name in best for near in [root, *best] if near != best[name])
        moves = [{**best, name: near} for name, near in pairs if name not in _way(best, near)]
        costs = [_cost(fabric, move, num_bytes) for move in moves]
        if not costs or min(costs) >= best_s:
            return best
        best_s = min(costs)
        best = moves[costs.index(best_s)]


def _cost(fabric: NodeFabric, parents: Mapping[str, str], num_bytes: float) -> tuple[float, float]:
    """Returns the cost of a tree: the seconds until the last receiver has the version and, to decide ties, the sum of
    these seconds over all receivers."""
    senders = {name: (sender,) for name, sender in parents.items()}
    seconds = arrival_s(fabric, senders, num_bytes).values()
    return round(max(seconds), 9), round(sum(seconds), 9)


def _way(parents: Mapping[str, str], name: str) -> list[str]:
    """Names on the path from a node up to the root, both included."""
    way = [name]
    while way[-1] in parents:
        way.append(parents[way[-1]])
    return way
