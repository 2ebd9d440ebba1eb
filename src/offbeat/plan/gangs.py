"""All training gangs worth a look: whole nodes of one class, or of two by pipeline or by data parallelism.

Guarantees: every gang fits the memory of each of its cards; tensor parallelism stays inside a node, collectives
inside a zone; no gang is left that another beats with no more nodes of any class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from offbeat.errors import UserError
from offbeat.plan.cost.constants import Constants
from offbeat.plan.cost.memory import kept_bytes, training_bytes, usable_bytes
from offbeat.plan.cost.sync import publish_s
from offbeat.plan.cost.training import Fabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.plan.fronts import fastest_first_front
from offbeat.plan.hardware import Inventory, MachineClass
from offbeat.plan.problem import Gang
from offbeat.plan.rollout import tensor_parallels
from offbeat.plan.workload import Workload

PIPELINES = (1, 2, 4, 8, 16)
NODES_GROWTH = 1.1
"""From one size of large gangs to the next: what lies between is at most that much faster."""
MIXED_GROWTH = 2.0
ZERO_STAGES = (1, 2, 3)


Known = dict[tuple[object, ...], list[Gang]]
"""Gangs by the classes, and the links among them, that they were made from; all for one workload and its constants."""


def gangs(
    inventory: Inventory, workload: Workload, constants: Constants, known: Known | None = None
) -> tuple[Gang, ...]:
    """Homogeneous and mixed ones, pruned to those that are the fastest for their nodes.

    `known` holds what earlier calls found, so that an inventory which differs in one class costs little.
    """
    known = {} if known is None else known
    classes = [machines for machines in inventory.classes.values() if machines.num_nodes > 0]
    alone: dict[str, list[Gang]] = {}
    for machines in classes:
        key = _key(inventory, machines)
        if key not in known:
            known[key] = fastest_first_front(_alone(machines, inventory, workload, constants))
        alone[machines.name] = known[key]
    found = [gang for front in alone.values() for gang in front]
    for one, other in combinations(classes, 2):
        key = _key(inventory, one, other)
        if key not in known:
            rivals = [*alone[one.name], *alone[other.name]]
            front = fastest_first_front([*rivals, *_mixed(one, other, inventory, workload, constants)])
            mixed = [gang for gang in front if len(gang.nodes) > 1]
            known[key] = [each for gang in mixed for each in (gang, _from_the_other(gang, inventory, workload))]
        found += known[key]
    if not found:
        raise UserError(_too_large(classes, workload, constants))
    return tuple(found)


def _key(inventory: Inventory, *classes: MachineClass) -> tuple[object, ...]:
    """All of an inventory that gangs on these classes depend on."""
    names = [machines.name for machines in classes]
    return (*classes, *(inventory.links.get(frozenset((one, other))) for one in names for other in names))


def node_grid(largest: int, growth: float = NODES_GROWTH) -> list[int]:
    """All small sizes, then even ratios, and the largest."""
    grid, size = [], 1
    while size < largest:
        grid.append(size)
        size = max(size + 1, int(size * growth))
    return [*grid, largest]


def _kept(workload: Workload, splits: Mapping[str, tuple[int, float]], dp: int, zero: int) -> dict[str, float]:
    """By class, from its tensor parallelism and how often its share of the layers goes into all; nothing where cards
    never generate."""
    if not workload.may_share:
        return {}
    return {name: kept_bytes(workload, tp, pp, dp, zero) for name, (tp, pp) in splits.items()}


def over_links(gang: Gang, inventory: Inventory, workload: Workload, constants: Constants) -> Gang:
    """The same gang on the same nodes, with the step that an inventory's links give it."""
    parts = tuple((inventory.classes[name], num_nodes) for name, num_nodes in gang.nodes.items())
    if len(parts) == 1:
        same = _alone_on(*parts[0], inventory, workload, constants)
    else:
        one, other = parts
        make = _replicated if gang.batch_shares else _pipelined
        same = make((one, other), inventory, workload, constants)
    # Of two ways with the same ZeRO stage, one of which recomputes, the faster was kept.
    shape = (gang.tp, gang.pp, gang.dp, gang.zero)
    ways = (each for each in same if (each.tp, each.pp, each.dp, each.zero) == shape)
    return replace(gang, step_s=min(each.step_s for each in ways))


def _alone(machines: MachineClass, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[Gang]:
    """Gangs of one class, of every size on the grid."""
    for num_nodes in node_grid(machines.num_nodes):
        yield from _alone_on(machines, num_nodes, inventory, workload, constants)


def _alone_on(
    machines: MachineClass, num_nodes: int, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Every split of the cards of so many nodes into tensor, pipeline and data parallelism."""
    figures, card = constants.of(machines.accelerator.name), machines.accelerator
    fabric = fabric_of(machines, inventory)
    num_cards = num_nodes * machines.per_node
    for tp in tensor_parallels(workload, machines):
        for pp in PIPELINES:
            dp, rest = divmod(num_cards, tp * pp)
            if rest or dp < 1 or pp > workload.model.num_layers or dp > max_replicas(workload):
                continue
            layers = split_layers(workload.model.num_layers, [1.0] * pp)
            flops = num_cards * card.flops * figures.training_share
            uneven = max(layers) * pp / workload.model.num_layers
            for zero, recompute in fits(workload, usable_bytes(card, figures), tp, pp, dp, max(layers)):
                step_s = compute_s(workload, flops, recompute=recompute) * bubble(workload, pp, dp) * uneven
                step_s += tp_s(workload, figures, fabric, tp, pp, dp)
                step_s += dp_s(workload, figures, fabric, tp, pp, dp, zero)
                yield Gang(
                    name=f"{machines.name} x{num_nodes} tp{tp} pp{pp} dp{dp}",
                    nodes={machines.name: num_nodes},
                    root=machines.name,
                    step_s=step_s,
                    publish_s=publish_s(workload, machines),
                    tp=tp,
                    pp=pp,
                    dp=dp,
                    layers=layers,
                    zero=zero,
                    kept_bytes=_kept(
                        workload, {machines.name: (tp, workload.model.num_layers / max(layers))}, dp, zero
                    ),
                )


def _mixed(
    one: MachineClass, other: MachineClass, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Two classes in one zone: the same replicas with layers by speed, or more replicas with batches by speed."""
    if one.zone != other.zone:
        return
    for nodes_one in node_grid(one.num_nodes, MIXED_GROWTH):
        for nodes_other in node_grid(other.num_nodes, MIXED_GROWTH):
            parts = ((one, nodes_one), (other, nodes_other))
            yield from _pipelined(parts, inventory, workload, constants)
            yield from _replicated(parts, inventory, workload, constants)


Parts = tuple[tuple[MachineClass, int], tuple[MachineClass, int]]


def _speeds(parts: Parts, constants: Constants) -> list[float]:
    return [
        nodes * part.per_node * part.accelerator.flops * constants.of(part.accelerator.name).training_share
        for part, nodes in parts
    ]


def _pipelined(parts: Parts, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[Gang]:
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
            kept_bytes=_kept(workload, splits, dp, zero),
        )  # fmt: skip


def _replicated(parts: Parts, inventory: Inventory, workload: Workload, constants: Constants) -> Iterator[Gang]:
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
        kept = _kept(workload, {part.name: (tp, 1.0) for part, _ in parts}, dp, zero)
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


def _from_the_other(gang: Gang, inventory: Inventory, workload: Workload) -> Gang:
    """The same gang with its other class publishing, which may be nearer to the rollout machines."""
    (root,) = gang.nodes.keys() - {gang.root}
    publish = publish_s(workload, inventory.classes[root])
    return replace(gang, name=f"{gang.name} from {root}", root=root, publish_s=publish)


def fabric_of(machines: MachineClass, inventory: Inventory) -> Fabric:
    """What a class communicates over inside itself; a single node may have no link to others of its class."""
    card_bytes_per_s = machines.accelerator.link_bytes_per_s
    link = inventory.links.get(frozenset((machines.name,)))
    return Fabric(card_bytes_per_s, link.bytes_per_s if link else card_bytes_per_s, machines.per_node)


def max_replicas(workload: Workload) -> int:
    """Each replica wants at least one trajectory of every update."""
    return max(1, workload.trajectories_per_step // workload.updates_per_step)


def split_layers(num_layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Layers of each stage in proportion to its speed, each at least one; the slowest stage is as short as can be."""
    layers = [max(1, int(num_layers * speed / sum(speeds)) - 1) for speed in speeds]
    if sum(layers) > num_layers:
        layers = [1] * len(speeds)
    for _ in range(num_layers - sum(layers)):
        stage = min(range(len(speeds)), key=lambda stage: (layers[stage] + 1) / speeds[stage])
        layers[stage] += 1
    return tuple(layers)


def fits(workload: Workload, room_bytes: float, tp: int, pp: int, dp: int, num_layers: int) -> list[tuple[int, bool]]:
    """ZeRO stages, each with whether to recompute, that fit. Stage 2 costs no time over 1, so one of them is enough."""
    share = num_layers / workload.model.num_layers
    found = []
    for recompute in (False, True):
        for zero in ZERO_STAGES:
            if training_bytes(workload, tp, pp, dp, zero, recompute=recompute, layer_share=share) <= room_bytes:
                found.append((zero, recompute))
                if zero < 3:
                    break
        if found and found[-1][0] < 3:
            break
    return found


def cheapest(ways: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
    """Recomputing costs a third of the arithmetic, which slow links make ZeRO-3's gathers exceed."""
    return min(ways, key=lambda way: (way[0] == 3, way[1]))


def _too_large(classes: Sequence[MachineClass], workload: Workload, constants: Constants) -> str:
    """The least memory is that of all nodes of a class under ZeRO-3 with everything recomputed."""
    needs = {}
    for machines in classes:
        num_cards = machines.num_accelerators
        needs[machines.name] = min(
            training_bytes(workload, tp, 1, max(1, num_cards // tp), 3, recompute=True)
            / constants.of(machines.accelerator.name).memory_share
            for tp in tensor_parallels(workload, machines)
        )
    if not needs:
        return "the cluster has no nodes: give a class num_nodes of 1 or more"
    least = min(needs, key=lambda name: needs[name])
    return (
        f"model {workload.model.name}: no gang has memory enough to train it; "
        f"{needs[least] / 1e9:.1f} GB per accelerator would do on class {least}, or more nodes"
    )
