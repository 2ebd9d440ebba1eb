"""Chooses the cards of each part of a training gang (nodes that train together) and of each rollout replica.

Tensor parallelism communicates twice per layer, so its groups never leave a node. Pipeline stages communicate least, so
they may cross from one class of nodes to another. The gradient rings of a stage run over neighbouring nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import UserError
from offbeat.planner.place.nodes import Node, NodeFabric, class_and_number
from offbeat.planner.problem import Gang


@dataclass(frozen=True)
class Group:
    """Neighbouring cards of one node: `size` cards, numbered from `first` on."""

    node: str
    first: int
    size: int


@dataclass(frozen=True)
class Placed:
    """A rollout replica on its cards."""

    column: str
    group: Group


Stages = tuple[tuple[Group, ...], ...]
"""Cards of a gang: for each pipeline stage, its tensor-parallel groups in the order of the stage's gradient ring."""


def pack(
    sizes: Mapping[str, int], counts: Mapping[str, int], nodes: Sequence[Node], taken: int = 0
) -> list[Placed] | None:
    """Places replicas, the largest first, each on the first node with room for it; returns None if they do not all fit.

    `sizes` (cards per replica) and `counts` (number of replicas) are by column (replica shape). The first `taken` cards
    of every node are left out. Sizes that are powers
    of two and divide a node leave no gaps."""
    used = [taken] * len(nodes)
    placed = []
    for column in sorted(counts, key=lambda name: (-sizes[name], name)):
        size, at = sizes[column], 0
        for _ in range(counts[column]):
            while at < len(nodes) and used[at] + size > nodes[at].per_node:
                at += 1  # a full node stays full for this size
            if at == len(nodes):
                return None
            placed.append(Placed(column, Group(nodes[at].name, used[at], size)))
            used[at] += size
    return placed


def ring_order(fabric: NodeFabric, names: Sequence[str]) -> tuple[str, ...]:
    """Orders nodes in a ring for all-reduces. If no links were measured, the order is by zone and class. Otherwise a
    ring is built from each node by always following the fastest link, to a node of the same class if one is left.
    Returns the ring whose slowest link is fastest."""
    if len(names) < 3:
        return tuple(names)
    left = sorted(names, key=lambda name: (fabric.nodes[name].zone, *class_and_number(name)))
    if fabric.is_alike:
        return tuple(left)
    rings, rate = [], fabric.bytes_per_s
    for start in left:
        ring, rest = [start], [name for name in left if name != start]
        while rest:
            here = fabric.nodes[ring[-1]]
            following = max(rest, key=lambda name: (fabric.nodes[name].offer == here.offer, rate(ring[-1], name)))
            ring.append(following)
            rest.remove(following)
        rings.append(tuple(ring))
    return max(rings, key=lambda ring: ring_bytes_per_s(fabric, ring))


def ring_bytes_per_s(fabric: NodeFabric, ring: Sequence[str]) -> float:
    """Bytes per second of the slowest link of a ring, which limits its all-reduce; infinite for a single node."""
    if len(ring) < 2:
        return float("inf")
    return min(fabric.bytes_per_s(one, other) for one, other in zip(ring, [*ring[1:], ring[0]], strict=True))


def lay_gang(fabric: NodeFabric, gang: Gang, names: Sequence[str]) -> Stages:
    """Returns the cards of each pipeline stage of a gang on the nodes `names`; a stage uses neighbouring nodes.

    If data parallelism crosses classes, each class holds whole pipelines; otherwise each class holds whole stages. If
    each class holds exactly one stage, the stages may differ in tensor parallelism."""
    if len(gang.nodes) == gang.pp > 1 and not gang.batch_shares:
        return tuple(_class_stage(fabric, gang, offer, names) for offer in gang.nodes)
    groups: dict[str, list[Group]] = {}
    for name in ring_order(fabric, names):
        node = fabric.nodes[name]
        if node.per_node % gang.tp:
            raise UserError(
                f"gang {gang.name}: tp {gang.tp} does not divide the {node.per_node} cards of {name}; choose another tp"
            )
        # A gang on a part of one node trains on its first cards.
        num_cards = min(node.per_node, gang.tp * gang.pp * gang.dp)
        firsts = range(0, num_cards, gang.tp)
        groups.setdefault(node.offer, []).extend(Group(name, first, gang.tp) for first in firsts)
    num_groups = sum(map(len, groups.values()))
    if num_groups != gang.pp * gang.dp:
        raise UserError(
            f"gang {gang.name}: pp {gang.pp} x dp {gang.dp} needs {gang.pp * gang.dp} groups of {gang.tp} cards, "
            f"but its nodes have {num_groups}; choose pp and dp with this product"
        )
    if not gang.batch_shares:
        row = [group for of_class in groups.values() for group in of_class]
        return tuple(tuple(row[i * gang.dp : (i + 1) * gang.dp]) for i in range(gang.pp))
    stages: list[list[Group]] = [[] for _ in range(gang.pp)]
    for offer, of_class in groups.items():
        num_pipelines, rest = divmod(len(of_class), gang.pp)
        if rest:
            raise UserError(
                f"gang {gang.name}: its nodes of {offer} have {len(of_class)} groups of {gang.tp} cards, which is no "
                f"multiple of pp {gang.pp}; a pipeline consists of {gang.pp} groups of one class"
            )
        for i, stage in enumerate(stages):
            stage += of_class[i * num_pipelines : (i + 1) * num_pipelines]
    return tuple(map(tuple, stages))


def _class_stage(fabric: NodeFabric, gang: Gang, offer: str, names: Sequence[str]) -> tuple[Group, ...]:
    """Returns a pipeline stage on all cards of the class `offer` among `names`: one tensor-parallel group for each
    data-parallel replica."""
    nodes = [fabric.nodes[name] for name in ring_order(fabric, [n for n in names if fabric.nodes[n].offer == offer])]
    num_cards = sum(node.per_node for node in nodes)
    tp, rest = divmod(num_cards, gang.dp)
    if rest or not tp or any(node.per_node % tp for node in nodes):
        cannot = f"cannot be divided into {gang.dp} equal groups, each inside one node; choose another dp"
        raise UserError(f"gang {gang.name}: {num_cards} cards of {offer} {cannot}")
    return tuple(Group(node.name, first, tp) for node in nodes for first in range(0, node.per_node, tp))
