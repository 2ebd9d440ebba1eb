"""Training gangs of two classes: one pipeline stage of each, or replicas of both.

Guarantees: both are in one zone; every gang fits the memory of each of its cards; layers, or the batch, are divided in
proportion to speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offbeat.plan.cost.constants import Constants
from offbeat.plan.cost.memory import usable_bytes
from offbeat.plan.cost.sync import publish_s
from offbeat.plan.cost.training import Fabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.plan.gang_shapes import cheapest, fabric_of, fits, kept_by_class, max_replicas, node_grid, split_layers
from offbeat.plan.hardware import Inventory, MachineClass
from offbeat.plan.problem import Gang
from offbeat.plan.rollout import tensor_parallels
from offbeat.plan.workload import Workload

MIXED_GROWTH = 2.0
Parts = tuple[tuple[MachineClass, int], tuple[MachineClass, int]]


def mixed(
    one: MachineClass, other: MachineClass, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Two classes in one zone: the same replicas with layers by speed, or more replicas with batches by speed."""
    if one.zone != other.zone:
        return
    for nodes_one in node_grid(one.num_nodes, MIXED_GROWTH):
        for nodes_other in node_grid(other.num_nodes, MIXED_GROWTH):
            parts = ((one, nodes_one), (other, nodes_other))
            yield from pipelined(parts, inventory, workload, constants)
            yield from replicated(parts, inventory, workload, constants)


def _speeds(parts: Parts, constants: Constants) -> list[float]:
    return [
        nodes * part.per_node * part.accelerator.flops * constants.of(part.accelerator.name).training_share
        for part, nodes in parts
    ]


def pipelined(parts: Parts, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[Gang]:
    """One stage of each class; both have the same number of replicas, and layers in proportion to their speed."""
    (one, nodes_one), (other, nodes_other) = parts
    speeds, num_layers = _speeds(parts, constants), workload.model.num_layers
    layers = split_layers(num_layers, speeds)
    for tp in tensor_parallels(workload, one):
        dp = nodes_one * one.per_node // tp
        tp_other, rest = divmod(nodes_other * other.per_node, dp)
        if rest or tp_other not in tensor_parallels(workload, other) or dp > max_replicas(workload):
            continue
        ways = []
        for (part, _), degree, count in zip(parts, (tp, tp_other), layers, strict=True):
            room = usable_bytes(part.accelerator, constants.of(part.accelerator.name))
            ways.append(fits(workload, room, degree, 2, dp, count))
        if not all(ways):
            continue
        chosen = [cheapest(way) for way in ways]
        zero, recompute = max(way[0] for way in chosen), any(way[1] for way in chosen)
        stage_s = []
        for (part, _), degree, count, speed in zip(parts, (tp, tp_other), layers, speeds, strict=True):
            figures, fabric = constants.of(part.accelerator.name), fabric_of(part, inventory)
            share = count / num_layers
            part_s = share * compute_s(workload, speed, recompute=recompute) * bubble(workload, 2, dp)
            part_s += tp_s(workload, figures, fabric, degree, 1, dp) * share
            stage_s.append(part_s + dp_s(workload, figures, fabric, degree, 1 / share, dp, zero))
        link = inventory.link(one.name, other.name)
        crossing_s = boundary_s(workload, link.bytes_per_s, 1 if link.is_shared else min(nodes_one, nodes_other))
        splits = {one.name: (tp, num_layers / layers[0]), other.name: (tp_other, num_layers / layers[1])}
        yield _mixed_gang(
            parts, "pp", max(*stage_s, crossing_s), workload, tp=tp, pp=2, dp=dp, layers=layers, zero=zero,
            kept_bytes=kept_by_class(workload, splits, dp, zero),
        )  # fmt: skip


def replicated(parts: Parts, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[Gang]:
    """Replicas of both classes with batches in proportion to their speed; gradients cross the slowest link."""
    (one, nodes_one), (other, nodes_other) = parts
    speeds, num_layers = _speeds(parts, constants), workload.model.num_layers
    shares = {part.name: speed / sum(speeds) for (part, _), speed in zip(parts, speeds, strict=True)}
    link = inventory.link(one.name, other.name)
    num_links = min(nodes_one, nodes_other)
    crossing = link.bytes_per_s / num_links if link.is_shared else link.bytes_per_s
    for tp in set(tensor_parallels(workload, one)) & set(tensor_parallels(workload, other)):
        dp = (nodes_one * one.per_node + nodes_other * other.per_node) // tp
        if dp > max_replicas(workload):
            continue
        rooms = [usable_bytes(part.accelerator, constants.of(part.accelerator.name)) for part, _ in parts]
        ways = fits(workload, min(rooms), tp, 1, dp, num_layers)
        if not ways:
            continue
        zero, recompute = cheapest(ways)
        step_s = compute_s(workload, sum(speeds), recompute=recompute)
        figures = [constants.of(part.accelerator.name) for part, _ in parts]
        fabrics = [fabric_of(part, inventory) for part, _ in parts]
        slowest = Fabric(
            min(fabric.card_bytes_per_s for fabric in fabrics),
            min(crossing, *(fabric.node_bytes_per_s for fabric in fabrics)),
            max(fabric.per_node for fabric in fabrics),
        )
        step_s += max(tp_s(workload, one_, slowest, tp, 1, dp) for one_ in figures)
        step_s += max(dp_s(workload, one_, slowest, tp, 1, dp, zero) for one_ in figures)
        kept = kept_by_class(workload, {part.name: (tp, 1.0) for part, _ in parts}, dp, zero)
        yield _mixed_gang(
            parts, "dp", step_s, workload, tp=tp, dp=dp, layers=(num_layers,), zero=zero, batch_shares=shares,
            kept_bytes=kept,
        )  # fmt: skip


def _mixed_gang(parts: Parts, how: str, step_s: float, workload: Workload, **shape: object) -> Gang:
    """The class with more of the cards publishes: it has the more ways out."""
    root = max(parts, key=lambda part: part[0].per_node * part[1])[0]
    label = " + ".join(f"{part.name} x{nodes}" for part, nodes in parts)
    return Gang(
        name=f"{label} {how} tp{shape['tp']} dp{shape['dp']}",
        nodes={part.name: nodes for part, nodes in parts},
        root=root.name,
        step_s=step_s,
        publish_s=publish_s(workload, root),
        **shape,  # type: ignore[arg-type]
    )


def from_the_other(gang: Gang, inventory: Inventory, workload: Workload) -> Gang:
    """The same gang with its other class publishing, which may be nearer to the rollout machines."""
    (root,) = gang.nodes.keys() - {gang.root}
    publish = publish_s(workload, inventory.classes[root])
    return replace(gang, name=f"{gang.name} from {root}", root=root, publish_s=publish)
