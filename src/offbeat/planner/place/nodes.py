"""Nodes of an inventory by name (`h800-0`, `h800-1`, ...), and the rates between them.

Nodes of a class are interchangeable unless links between nodes were measured. A measured rate overrides the link of the
two classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx

from offbeat.planner.inputs.hardware import Inventory, Link


@dataclass(frozen=True)
class Node:
    name: str
    offer: str
    """Name of the node's class."""
    zone: str
    per_node: int


@dataclass(frozen=True)
class NodeFabric:
    """Nodes and the one-way rates between them."""

    inventory: Inventory
    nodes: Mapping[str, Node]
    measured: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Measured bytes per second between two nodes, by their names."""
    _ports: dict[tuple[str, bool], float] = field(default_factory=dict, repr=False, compare=False)
    """Cache of `port_bytes_per_s`."""

    @property
    def is_alike(self) -> bool:
        """Whether nodes of a class are interchangeable: True if no links between nodes were measured."""
        return not self.measured

    def link(self, one: str, other: str) -> Link:
        """Link between the classes of two nodes; a rate measured between the two nodes themselves is ignored."""
        return self.inventory.link(self.nodes[one].offer, self.nodes[other].offer)

    def bytes_per_s(self, one: str, other: str) -> float:
        known = self.measured.get(frozenset((one, other)))
        return self.link(one, other).bytes_per_s if known is None else known

    def port_bytes_per_s(self, name: str, is_near: bool) -> float:
        """Largest rate in bytes per second at which a node can send, and also receive: inside its class if `is_near`,
        otherwise to and from all other classes together. This is the rate of its fastest link of that kind."""
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

    def graph(self, names: list[str]) -> nx.Graph:
        """Complete graph over the nodes `names`; the edge attribute `weight` is in bytes per second."""
        graph = nx.Graph()
        graph.add_nodes_from(names)
        pairs = ((one, other) for i, one in enumerate(names) for other in names[:i])
        graph.add_weighted_edges_from((one, other, self.bytes_per_s(one, other)) for one, other in pairs)
        return graph


def nodes_of(inventory: Inventory) -> list[Node]:
    return [
        Node(f"{name}-{i}", name, machines.zone, machines.per_node)
        for name, machines in inventory.classes.items()
        for i in range(machines.num_nodes)
    ]


def by_class(fabric: NodeFabric, names: Iterable[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(fabric.nodes[name].offer, []).append(name)
    return members


def class_and_number(name: str) -> tuple[str, int]:
    """Sort key of node names: the class, then the node's number."""
    offer, _, number = name.rpartition("-")
    return offer, int(number)


def fabric_of(inventory: Inventory) -> NodeFabric:
    """All nodes of an inventory with the measured links between them. Links of removed nodes, which a reduced inventory
    may still hold, are left out."""
    nodes = {node.name: node for node in nodes_of(inventory)}
    measured = {pair: rate for pair, rate in inventory.measured.items() if pair <= nodes.keys()}
    return NodeFabric(inventory, nodes, measured)
