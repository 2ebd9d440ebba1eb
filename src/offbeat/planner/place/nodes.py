"""Nodes of an inventory by name (`h800-0`, `h800-1`, ...), and the rates between them.

Nodes of a class are interchangeable unless links between nodes were measured; a measured rate overrides the link of the
classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx

from offbeat.errors import UserError
from offbeat.planner.inputs.hardware import Inventory


@dataclass(frozen=True)
class Node:
    name: str
    offer: str
    """Its class."""
    zone: str
    per_node: int


@dataclass(frozen=True)
class NodeFabric:
    """Nodes and the rates between them, one way."""

    inventory: Inventory
    nodes: Mapping[str, Node]
    measured: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Bytes a second by the names of two nodes."""
    _ports: dict[tuple[str, bool], float] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `port_bytes_per_s`."""

    @property
    def is_alike(self) -> bool:
        """Whether nodes of a class are interchangeable."""
        return not self.measured

    def bytes_per_s(self, one: str, other: str) -> float:
        known = self.measured.get(frozenset((one, other)))
        return self.inventory.link(*self._offers(one, other)).bytes_per_s if known is None else known

    def latency_s(self, one: str, other: str) -> float:
        return self.inventory.link(*self._offers(one, other)).latency_s

    def is_shared(self, one: str, other: str) -> bool:
        return self.inventory.link(*self._offers(one, other)).is_shared

    def port_bytes_per_s(self, name: str, is_near: bool) -> float:
        """Most that a node sends or receives to nodes of its class, or to all others: its fastest such link."""
        key = (name, is_near)
        if key not in self._ports:
            self._ports[key] = max(self._port_rates(name, is_near), default=0.0)
        return self._ports[key]

    def _port_rates(self, name: str, is_near: bool) -> Iterator[float]:
        own = self.nodes[name].offer
        for pair, link in self.inventory.links.items():
            if own in pair and (len(pair) == 1) == is_near:
                yield link.bytes_per_s
        for pair, rate in self.measured.items():
            if name in pair and (len({self.nodes[one].offer for one in pair}) == 1) == is_near:
                yield rate

    def is_near(self, one: str, other: str) -> bool:
        return self.nodes[one].offer == self.nodes[other].offer

    def graph(self, names: Iterable[str]) -> nx.Graph:
        """The complete graph over some nodes; `weight` is bytes a second."""
        graph = nx.Graph()
        known = list(names)
        graph.add_nodes_from(known)
        graph.add_weighted_edges_from(
            (one, other, self.bytes_per_s(one, other)) for i, one in enumerate(known) for other in known[:i]
        )
        return graph

    def _offers(self, one: str, other: str) -> tuple[str, str]:
        return self.nodes[one].offer, self.nodes[other].offer


def nodes_of(inventory: Inventory, counts: Mapping[str, int] | None = None) -> tuple[Node, ...]:
    """The first `counts` nodes of each class; None: all."""
    nodes = []
    for name, machines in inventory.classes.items():
        num_nodes = machines.num_nodes if counts is None else counts.get(name, 0)
        if num_nodes > machines.num_nodes:
            raise UserError(f"class {name}: {num_nodes} nodes wanted, {machines.num_nodes} on offer; ask for fewer")
        nodes += [Node(f"{name}-{i}", name, machines.zone, machines.per_node) for i in range(num_nodes)]
    return tuple(nodes)


def fabric_of(inventory: Inventory, measured: Mapping[frozenset[str], float] | None = None) -> NodeFabric:
    """All nodes of an inventory, with its measured links or the given ones."""
    nodes = {node.name: node for node in nodes_of(inventory)}
    for pair in measured or {}:
        if unknown := sorted(pair - nodes.keys()):
            raise UserError(f"measured link {' - '.join(sorted(pair))}: no node {unknown[0]}; nodes are CLASS-NUMBER")
    if measured is None:  # a reduced inventory may still have links of removed nodes
        measured = {pair: rate for pair, rate in inventory.measured.items() if pair <= nodes.keys()}
    return NodeFabric(inventory, nodes, dict(measured))
