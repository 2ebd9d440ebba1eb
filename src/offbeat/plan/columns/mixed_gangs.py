"""Training gangs of two classes: one pipeline stage of each, or replicas of both.

Guarantees: both are in one zone; every gang fits the memory of each of its cards; layers, or the batch, are divided in
proportion to speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offbeat.plan.columns.gang_shapes import (
    cheapest,
    fabric_of,
    fits,
    kept_by_class,
    max_replicas,
    node_grid,
    split_layers,
)
from offbeat.plan.columns.rollout import tensor_parallels
from offbeat.plan.cost.constants import Constants, Figures
from offbeat.plan.cost.memory import usable_bytes
from offbeat.plan.cost.sync import publish_s
from offbeat.plan.cost.training import Fabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.plan.inputs.hardware import Inventory, Link, MachineClass
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.problem import Gang

MIXED_GROWTH = 2.0


@dataclass(frozen=True)
class Part:
    """A class as every gang on it finds it."""

    machines: MachineClass
    figures: Figures
    fabric: Fabric
    room_bytes: float
    """Of one card."""
    degrees: list[int]
    """Of tensor parallelism."""

    def flops(self, num_nodes: int) -> float:
        machines = self.machines
        return num_nodes * machines.per_node * machines.accelerator.flops * self.figures.training_share


def part_of(machines: MachineClass, inventory: Inventory, workload: Workload, constants: Constants) -> Part:
    figures = constants.of(machines.accelerator.name)
    room_bytes = usable_bytes(machines.accelerator, figures)
    return Part(machines, figures, fabric_of(machines, inventory), room_bytes, tensor_parallels(workload, machines))


Parts = tuple[tuple[Part, int], tuple[Part, int]]
"""Each with its number of nodes."""


def mixed(
    one: MachineClass, other: MachineClass, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Two classes in one zone: the same replicas with layers by speed, or more replicas with batches by speed."""
    if one.zone != other.zone:
        return
    first, second = (part_of(machines, inventory, workload, constants) for machines in (one, other))
    link = inventory.link(one.name, other.name)
    for nodes_one in node_grid(one.num_nodes, MIXED_GROWTH):
        for nodes_other in node_grid(other.num_nodes, MIXED_GROWTH):
            parts = ((first, nodes_one), (second, nodes_other))
            yield from pipelined(parts, link, workload)
            yield from replicated(parts, link, workload)


def pipelined(parts: Parts, link: Link, workload: Workload) -> Iterator[Gang]:
    """One stage of each class; both have the same number of replicas, and layers in proportion to their speed."""
    (one, nodes_one), (other, nodes_other) = parts
    speeds, num_layers = [part.flops(nodes) for part, nodes in parts], workload.model.num_layers
    layers = split_layers(num_layers, speeds)
    for tp in one.degrees:
        dp = nodes_one * one.machines.per_node // tp
        tp_other, rest = divmod(nodes_other * other.machines.per_node, dp)
        if rest or tp_other not in other.degrees or dp > max_replicas(workload):
            continue
        split = zip(parts, (tp, tp_other), layers, strict=True)
        ways = [fits(workload, part.room_bytes, degree, 2, dp, count) for (part, _), degree, count in split]
        if not all(ways):
            continue
        chosen = [cheapest(way) for way in ways]
        zero, recompute = max(way[0] for way in chosen), any(way[1] for way in chosen)
        stage_s = []
        for (part, _), degree, count, speed in zip(parts, (tp, tp_other), layers, speeds, strict=True):
            share = count / num_layers
            part_s = share * compute_s(workload, speed, recompute=recompute) * bubble(workload, 2, dp)
            part_s += tp_s(workload, part.figures, part.fabric, degree, 1, dp) * share
            stage_s.append(part_s + dp_s(workload, part.figures, part.fabric, degree, 1 / share, dp, zero))
        crossing_s = boundary_s(workload, link.bytes_per_s, 1 if link.is_shared else min(nodes_one, nodes_other))
        splits = {
            one.machines.name: (tp, num_layers / layers[0]),
            other.machines.name: (tp_other, num_layers / layers[1]),
        }
        yield _mixed_gang(
            parts, "pp", max(*stage_s, crossing_s), workload, tp=tp, pp=2, dp=dp, layers=layers, zero=zero,
            kept_bytes=kept_by_class(workload, splits, dp, zero),
        )  # fmt: skip


def replicated(parts: Parts, link: Link, workload: Workload) -> Iterator[Gang]:
    """Replicas of both classes with batches in proportion to their speed; gradients cross the slowest link."""
    (one, nodes_one), (other, nodes_other) = parts
    speeds, num_layers = [part.flops(nodes) for part, nodes in parts], workload.model.num_layers
    shares = {part.machines.name: speed / sum(speeds) for (part, _), speed in zip(parts, speeds, strict=True)}
    crossing = link.bytes_per_s / min(nodes_one, nodes_other) if link.is_shared else link.bytes_per_s
    slowest = Fabric(
        min(part.fabric.card_bytes_per_s for part, _ in parts),
        min(crossing, *(part.fabric.node_bytes_per_s for part, _ in parts)),
        max(part.fabric.per_node for part, _ in parts),
    )
    for tp in set(one.degrees) & set(other.degrees):
        dp = (nodes_one * one.machines.per_node + nodes_other * other.machines.per_node) // tp
        if dp > max_replicas(workload):
            continue
        ways = fits(workload, min(one.room_bytes, other.room_bytes), tp, 1, dp, num_layers)
        if not ways:
            continue
        zero, recompute = cheapest(ways)
        step_s = compute_s(workload, sum(speeds), recompute=recompute)
        step_s += max(tp_s(workload, part.figures, slowest, tp, 1, dp) for part, _ in parts)
        step_s += max(dp_s(workload, part.figures, slowest, tp, 1, dp, zero) for part, _ in parts)
        kept = kept_by_class(workload, {part.machines.name: (tp, 1.0) for part, _ in parts}, dp, zero)
        yield _mixed_gang(
            parts, "dp", step_s, workload, tp=tp, dp=dp, layers=(num_layers,), zero=zero, batch_shares=shares,
            kept_bytes=kept,
        )  # fmt: skip


def _mixed_gang(parts: Parts, how: str, step_s: float, workload: Workload, **shape: object) -> Gang:
    """The class with more of the cards publishes: it has the more ways out."""
    root = max(parts, key=lambda part: part[0].machines.per_node * part[1])[0].machines
    label = " + ".join(f"{part.machines.name} x{nodes}" for part, nodes in parts)
    return Gang(
        name=f"{label} {how} tp{shape['tp']} dp{shape['dp']}",
        nodes={part.machines.name: nodes for part, nodes in parts},
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
