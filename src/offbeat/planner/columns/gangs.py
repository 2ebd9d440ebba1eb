"""Training gangs (nodes that train together) worth considering: whole nodes of one class, or of two classes joined by
pipeline or data parallelism.

Guarantees: every gang fits the memory of each of its cards. Tensor parallelism stays inside a node, collectives stay
inside a zone. A gang is dropped if another with no more nodes of any class is about as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from offbeat.errors import UserError
from offbeat.planner.columns.replicas import tensor_parallels
from offbeat.planner.cost.constants import Constants, Efficiencies
from offbeat.planner.cost.memory import kept_bytes, training_bytes, usable_bytes
from offbeat.planner.cost.sync_time import publish_s
from offbeat.planner.cost.training_time import GangFabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Gang

MIN_GAIN = 0.02
"""Share by which a gang with more nodes must be faster to be kept. Smaller gains are below the accuracy of the cost
model."""
MIN_LEANER = 0.1
"""A gang that is not faster is kept only if its training state on cards that also run replicas is smaller by more than
this share."""


def fastest_first_front(candidates: Iterable[Gang]) -> list[Gang]:
    """Returns the gangs worth keeping. A gang is dropped if another gang is about as fast and takes no more nodes of
    any class. The other gang must also keep hardly more training state on cards shared with rollout replicas."""
    best: dict[object, Gang] = {}
    for gang in candidates:
        key = gang.name if gang.kept_bytes else tuple(sorted(gang.nodes.items()))
        if key not in best or gang.period_s < best[key].period_s:
            best[key] = gang
    kept: list[Gang] = []
    for gang in sorted(best.values(), key=lambda gang: (sum(gang.nodes.values()), gang.period_s)):
        period_s = gang.period_s
        if not any((1 - MIN_GAIN) * other.period_s <= period_s and _is_as_small(other, gang) for other in kept):
            kept.append(gang)
    return kept


def _is_as_small(one: Gang, other: Gang) -> bool:
    """Whether `one` takes no more nodes of any class than `other` and keeps hardly more training state on each card."""
    return all(other.nodes.get(name, 0) >= num for name, num in one.nodes.items()) and all(
        (1 - MIN_LEANER) * one.kept_bytes.get(name, 0.0) <= kept for name, kept in other.kept_bytes.items()
    )


NODES_GROWTH = 1.1
"""Ratio between neighbouring node counts that are tried for large gangs. A count in between could speed up training by
at most this ratio."""
ZERO_STAGES = (1, 2, 3)


def node_grid(largest: int, growth: float = NODES_GROWTH) -> list[int]:
    """Numbers of nodes to try: all small numbers, then steps by the factor `growth`, and `largest`."""
    grid, size = [], 1
    while size < largest:
        grid.append(size)
        size = max(size + 1, int(size * growth))
    return [*grid, largest]


def kept_by_class(workload: Workload, splits: Mapping[str, tuple[int, float]], dp: int, zero: int) -> dict[str, float]:
    """Returns the bytes of training state that stay on each card between two steps, by class of nodes; empty if
    generation never shares cards with training.

    `splits` holds, for each class, its tensor parallelism and its pipeline depth: the model's layers divided by the
    layers on one card, so perhaps a fraction."""
    shared = splits.items() if workload.may_share else ()
    return {name: kept_bytes(workload, tp, pp, dp, zero) for name, (tp, pp) in shared}


def fabric_of(machines: MachineClass, inventory: Inventory) -> GangFabric:
    """Returns the rates between cards and between nodes of a class. If the class has no link between nodes, the rate
    between cards stands for both."""
    card_bytes_per_s = machines.accelerator.link_bytes_per_s
    link = inventory.links.get(frozenset((machines.name,)))
    return GangFabric(card_bytes_per_s, link.bytes_per_s if link else card_bytes_per_s, machines.per_node)


def max_replicas(workload: Workload) -> int:
    """Largest number of data-parallel replicas: each must get at least one trajectory in every optimizer update."""
    return max(1, workload.trajectories_per_step // workload.updates_per_step)


def split_layers(num_layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Number of layers of each pipeline stage, so that the slowest stage is as fast as possible. `speeds` are the
    speeds of the stages; every stage has at least one layer."""
    layers = [max(1, int(num_layers * speed / sum(speeds)) - 1) for speed in speeds]
    if sum(layers) > num_layers:
        layers = [1] * len(speeds)
    for _ in range(num_layers - sum(layers)):
        stage = min(range(len(speeds)), key=lambda stage: (layers[stage] + 1) / speeds[stage])
        layers[stage] += 1
    return tuple(layers)


def fits(workload: Workload, room_bytes: float, tp: int, pp: int, dp: int, num_layers: int) -> list[tuple[int, bool]]:
    """Returns pairs (ZeRO stage, whether to recompute activations) with which a pipeline stage of `num_layers` layers
    fits into `room_bytes` per card. ZeRO-1 and ZeRO-2 take the same time, so only the lower stage that fits is
    returned. ZeRO-3 is tried only if neither ZeRO-1 nor ZeRO-2 fits. Recomputing is tried only if neither of them fits
    without it."""
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
    """Returns the preferred of the pairs that `fits` found. Recomputing (a third more arithmetic) is preferred to
    ZeRO-3, whose gathers cost more on slow links."""
    return min(ways, key=lambda way: (way[0] == 3, way[1]))


MIXED_GROWTH = 2.0


@dataclass(frozen=True)
class GangPart:
    """One of the two classes of nodes in a mixed gang (a gang of two classes), with its data for the cost model."""

    machines: MachineClass
    figures: Efficiencies
    fabric: GangFabric
    room_bytes: float
    """Usable memory of one card."""
    degrees: list[int]
    """Possible degrees of tensor parallelism."""

    def flops(self, num_nodes: int) -> float:
        machines = self.machines
        return num_nodes * machines.per_node * machines.accelerator.flops * self.figures.training_share


def part_of(machines: MachineClass, inventory: Inventory, workload: Workload, constants: Constants) -> GangPart:
    figures = constants.of(machines.accelerator.name)
    room_bytes = usable_bytes(machines.accelerator, figures)
    return GangPart(machines, figures, fabric_of(machines, inventory), room_bytes, tensor_parallels(workload, machines))


Parts = tuple[tuple[GangPart, int], tuple[GangPart, int]]
"""The two classes of nodes of a mixed gang, each with its number of nodes."""


def mixed(
    one: MachineClass, other: MachineClass, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Yields gangs of two classes, none across zones: a pipeline stage on each, or data-parallel replicas on both."""
    if one.zone != other.zone:
        return
    first, second = (part_of(machines, inventory, workload, constants) for machines in (one, other))
    link = inventory.link(one.name, other.name)
    for nodes in product(node_grid(one.num_nodes, MIXED_GROWTH), node_grid(other.num_nodes, MIXED_GROWTH)):
        parts = ((first, nodes[0]), (second, nodes[1]))
        yield from pipelined(parts, link, workload)
        yield from replicated(parts, link, workload)


def pipelined(parts: Parts, link: Link, workload: Workload) -> Iterator[Gang]:
    """Yields gangs with two pipeline stages, one on each class. Both stages have the same degree of data parallelism;
    layers are divided in proportion to the speeds of the classes."""
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
        names = one.machines.name, other.machines.name
        splits = {names[0]: (tp, num_layers / layers[0]), names[1]: (tp_other, num_layers / layers[1])}
        shape = {"tp": tp, "pp": 2, "dp": dp, "layers": layers, "zero": zero}
        kept = kept_by_class(workload, splits, dp, zero)
        yield _mixed_gang(parts, "pp", max(*stage_s, crossing_s), workload, **shape, kept_bytes=kept)


def replicated(parts: Parts, link: Link, workload: Workload) -> Iterator[Gang]:
    """Yields gangs with data-parallel copies of the model on both classes. Each class gets a share of the batch in
    proportion to its speed. Gradients move at the rate of the slowest link."""
    (one, nodes_one), (other, nodes_other) = parts
    speeds, num_layers = [part.flops(nodes) for part, nodes in parts], workload.model.num_layers
    shares = {part.machines.name: speed / sum(speeds) for (part, _), speed in zip(parts, speeds, strict=True)}
    crossing = link.bytes_per_s / min(nodes_one, nodes_other) if link.is_shared else link.bytes_per_s
    slowest = GangFabric(
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
        shape = {"tp": tp, "dp": dp, "layers": (num_layers,), "zero": zero, "batch_shares": shares}
        yield _mixed_gang(parts, "dp", step_s, workload, **shape, kept_bytes=kept)


def _mixed_gang(parts: Parts, how: str, step_s: float, workload: Workload, **shape: object) -> Gang:
    """Builds a gang of two classes. Its name contains `how` (pp or dp), the way in which the classes are joined. The
    class with more cards publishes the weights, because it has more links."""
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
    """Returns a copy of a gang of two classes, in which the other class (not `gang.root`) publishes the weights. That
    class may have faster links to the rollout nodes."""
    (root,) = gang.nodes.keys() - {gang.root}
    publish = publish_s(workload, inventory.classes[root])
    return replace(gang, name=f"{gang.name} from {root}", root=root, publish_s=publish)


PIPELINES = (1, 2, 4, 8, 16)


Known = dict[tuple[object, ...], list[Gang]]
"""Cache of gangs for one workload and its constants, keyed by the gangs' classes and the links among these classes."""


def gangs(
    inventory: Inventory, workload: Workload, constants: Constants, known: Known | None = None
) -> tuple[Gang, ...]:
    """Returns training gangs on one or two classes of nodes, except gangs that another gang beats. `known` caches
    results between calls with the same workload and constants."""
    known = {} if known is None else known
    classes = [machines for machines in inventory.classes.values() if machines.num_nodes > 0]
    alone: dict[str, list[Gang]] = {}
    for machines in classes:
        key = _key(inventory, machines)
        if key not in known:
            given = inventory, workload, constants
            sizes = node_grid(machines.num_nodes)
            known[key] = fastest_first_front(gang for size in sizes for gang in _alone_on(machines, size, *given))
        alone[machines.name] = known[key]
    found = [gang for front in alone.values() for gang in front]
    for one, other in combinations(classes, 2):
        key = _key(inventory, one, other)
        if key not in known:
            rivals = [*alone[one.name], *alone[other.name]]
            front = fastest_first_front([*rivals, *mixed(one, other, inventory, workload, constants)])
            kept = [gang for gang in front if len(gang.nodes) > 1]
            known[key] = [each for gang in kept for each in (gang, from_the_other(gang, inventory, workload))]
        found += known[key]
    if not found:
        raise UserError(_too_large(classes, workload, constants))
    return tuple(found)


def _key(inventory: Inventory, *classes: MachineClass) -> tuple[object, ...]:
    """Cache key: everything in the inventory that gangs on these classes depend on."""
    names = [machines.name for machines in classes]
    return (*classes, *(inventory.links.get(frozenset((one, other))) for one in names for other in names))


def over_links(gang: Gang, inventory: Inventory, workload: Workload, constants: Constants) -> Gang:
    """Returns `gang` with its step time computed again, for the links of `inventory`. Its parallelism does not
    change."""
    parts = tuple((inventory.classes[name], num_nodes) for name, num_nodes in gang.nodes.items())
    if len(parts) == 1:
        same = _alone_on(*parts[0], inventory, workload, constants)
    else:
        one, other = ((part_of(each, inventory, workload, constants), num) for each, num in parts)
        make = replicated if gang.batch_shares else pipelined
        same = make((one, other), inventory.link(*gang.nodes), workload)
    # If two gangs of this shape differ only in recomputing, `fastest_first_front` kept the faster one.
    shape = (gang.tp, gang.pp, gang.dp, gang.zero)
    ways = (each for each in same if (each.tp, each.pp, each.dp, each.zero) == shape)
    return replace(gang, step_s=min(each.step_s for each in ways))


def _alone_on(
    machines: MachineClass, num_nodes: int, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Yields a gang for every split of `num_nodes` nodes into tensor, pipeline and data parallelism that fits into
    memory."""
    figures, card = constants.of(machines.accelerator.name), machines.accelerator
    fabric = fabric_of(machines, inventory)
    num_cards = num_nodes * machines.per_node
    root, after_s = machines.name, publish_s(workload, machines)
    for tp in tensor_parallels(workload, machines):
        for pp in PIPELINES:
            dp, rest = divmod(num_cards, tp * pp)
            if rest or dp < 1 or pp > workload.model.num_layers or dp > max_replicas(workload):
                continue
            layers = split_layers(workload.model.num_layers, [1.0] * pp)
            flops = num_cards * card.flops * figures.training_share
            fullest = workload.model.num_layers / max(layers)  # number of stages if all were as long as the longest
            for zero, recompute in fits(workload, usable_bytes(card, figures), tp, pp, dp, max(layers)):
                step_s = compute_s(workload, flops, recompute=recompute) * bubble(workload, pp, dp) * pp / fullest
                step_s += tp_s(workload, figures, fabric, tp, fullest, dp)
                step_s += dp_s(workload, figures, fabric, tp, fullest, dp, zero)
                name, nodes = f"{root} x{num_nodes} tp{tp} pp{pp} dp{dp}", {root: num_nodes}
                kept = kept_by_class(workload, {root: (tp, fullest)}, dp, zero)
                yield Gang(name, nodes, root, step_s, after_s, tp, pp, dp, layers, zero=zero, kept_bytes=kept)


def _too_large(classes: Sequence[MachineClass], workload: Workload, constants: Constants) -> str:
    """Returns the error message for a model that no gang can train. It names the class of nodes that needs the least
    memory per accelerator, and how much. This need is computed for a gang of all nodes of the class, with ZeRO-3 and
    recomputing."""
    needs = {}
    for machines in classes:
        num_cards = machines.num_accelerators
        needs[machines.name] = min(
            training_bytes(workload, tp, 1, max(1, num_cards // tp), 3, recompute=True)
            / constants.of(machines.accelerator.name).memory_share
            for tp in tensor_parallels(workload, machines)
        )
    if not needs:
        return "the cluster has no nodes; give at least one class 1 node or more"
    least = min(needs, key=lambda name: needs[name])
    remedy = f"class {least} would need {needs[least] / 1e9:.1f} GB per accelerator, or more nodes"
    return f"model {workload.model.name}: no class of machines has enough memory to train it; {remedy}"
