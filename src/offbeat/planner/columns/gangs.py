"""Training gangs (nodes that train together) worth considering: whole nodes of one class, or of two classes joined by
pipeline or data parallelism.

Guarantees: every gang fits the memory of each of its cards. Tensor parallelism stays inside a node, collectives stay
inside a zone. A gang is dropped if another with no more nodes of any class is about as good.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from offbeat.errors import UserError
from offbeat.planner.columns.replicas import tensor_parallels, up_share
from offbeat.planner.cost.constants import Constants, Efficiencies
from offbeat.planner.cost.memory import kept_bytes, training_bytes, usable_bytes
from offbeat.planner.cost.sync_time import publish_s
from offbeat.planner.cost.training_time import GangFabric, boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Gang

COMPLETE_NODES = 40
"""Largest number of nodes, over all classes, for which every number of nodes and every gang that could be of use is
tried. Larger clusters try numbers of nodes on a grid, and drop gangs that gain less than `MIN_GAIN`."""
MIN_GAIN = 0.02
"""Share by which a gang with more nodes must be faster to be kept in a large cluster. Smaller gains are below the
accuracy of the cost model."""
MIN_LEANER = 0.1
"""A gang of a large cluster that is not faster is kept only if its training state on cards that also run replicas is
smaller by more than this share."""


def is_complete(inventory: Inventory) -> bool:
    """Whether the gangs and replica shapes of these machines are all that the cost model can express."""
    return sum(machines.num_nodes for machines in inventory.classes.values()) <= COMPLETE_NODES


def fastest_first_front(candidates: Iterable[Gang], min_gain: float = 0.0, min_leaner: float = 0.0) -> list[Gang]:
    """Returns the gangs worth keeping. A gang is dropped if another gang that publishes from the same class is as fast
    (up to the share `min_gain`) and takes no more nodes of any class. The other gang must also keep no more training
    state on cards shared with rollout replicas (up to the share `min_leaner`)."""
    best: dict[object, Gang] = {}
    for gang in candidates:
        key: object = gang.name if gang.kept_bytes else (gang.root, *sorted(gang.nodes.items()), _num_home(gang))
        if key not in best or gang.period_s < best[key].period_s:
            best[key] = gang
    kept: dict[str, list[Gang]] = {}
    for gang in sorted(best.values(), key=lambda gang: (sum(gang.nodes.values()), gang.period_s)):
        period_s, rivals = gang.period_s, kept.setdefault(gang.root, [])
        if not any((1 - min_gain) * other.period_s <= period_s and _is_as_small(other, gang, min_leaner)
                   for other in rivals):  # fmt: skip
            rivals.append(gang)
    return [gang for gangs in kept.values() for gang in gangs]


def _is_as_small(one: Gang, other: Gang, min_leaner: float) -> bool:
    """Whether `one` takes no more nodes of any class than `other` and keeps hardly more training state on each card."""
    if _num_home(one) < _num_home(other):
        return False
    return all(other.nodes.get(name, 0) >= num for name, num in one.nodes.items()) and all(
        (1 - min_leaner) * one.kept_bytes.get(name, 0.0) <= kept for name, kept in other.kept_bytes.items()
    )


def _num_home(gang: Gang) -> int:
    """Cards that a gang on a part of a node leaves to replicas."""
    return sum((gang.home_cards or {}).values())


NODES_GROWTH = 1.1
"""Ratio between neighbouring node counts that are tried for large gangs. A count in between could speed up training by
at most this ratio."""


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


WAYS = ((1, False), (2, False), (3, False), (1, True), (2, True), (3, True))
"""Pairs of a ZeRO stage and whether activations are recomputed."""


def fits(workload: Workload, room_bytes: float, tp: int, pp: int, dp: int, num_layers: int) -> list[tuple[int, bool]]:
    """Returns those of `WAYS` with which a pipeline stage of `num_layers` layers fits into `room_bytes` per card, and
    that may be of use. ZeRO-1 and ZeRO-2 take the same time, and neither they nor saved activations are slower than
    what saves more memory, so the first of them that fits is enough. Only if replicas share the cards, ways that keep
    less of the weights there matter too."""
    share = num_layers / workload.model.num_layers
    found: list[tuple[int, bool]] = []
    for zero, recompute in WAYS:
        if zero == 1 and dp > 1 and not workload.any_trainer:
            continue
        if found and not workload.may_share and (found[0][0] < 3 or found[0][1]):
            break
        if zero == 2 and (1, recompute) in found:
            continue
        if training_bytes(workload, tp, pp, dp, zero, recompute=recompute, layer_share=share) <= room_bytes:
            found.append((zero, recompute))
    return found


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
    growth = 1.0 if is_complete(inventory) else MIXED_GROWTH
    for nodes in product(node_grid(one.num_nodes, growth), node_grid(other.num_nodes, growth)):
        parts = ((first, nodes[0]), (second, nodes[1]))
        yield from pipelined(parts, link, workload)
        yield from replicated(parts, link, workload)


def pipelined(parts: Parts, link: Link, workload: Workload, layers: tuple[int, ...] = ()) -> Iterator[Gang]:
    """Yields gangs with two pipeline stages, one on each class, for each way to keep memory. Both stages have the same
    degree of data parallelism. Layers are divided so that the slower stage is as fast as possible and each stage fits
    its cards; `layers` fixes them."""
    (one, nodes_one), (other, nodes_other) = parts
    for tp in one.degrees:
        dp = nodes_one * one.machines.per_node // tp
        tp_other, rest = divmod(nodes_other * other.machines.per_node, dp)
        if rest or tp_other not in other.degrees or dp > max_replicas(workload):
            continue
        crossing_s = boundary_s(workload, link.bytes_per_s, 1 if link.is_shared else min(nodes_one, nodes_other))
        for zero, recompute in WAYS:
            pairs = zip(parts, (tp, tp_other), strict=True)
            stages = [_stage(workload, part, num, each, dp, zero, recompute) for (part, num), each in pairs]
            best = divided(workload, stages, layers)
            if best is None:
                continue
            stage_s, split = best
            is_best = zero < 3 and not recompute and not workload.may_share and best == divided(
                workload, [replace(stage, room_bytes=math.inf) for stage in stages], layers
            )  # fmt: skip
            names = one.machines.name, other.machines.name
            splits = {
                name: (degree, workload.model.num_layers / count)
                for name, degree, count in zip(names, (tp, tp_other), split, strict=True)
            }
            shape = {"tp": tp, "pp": 2, "dp": dp, "layers": split, "zero": zero}
            kept = kept_by_class(workload, splits, dp, zero)
            how = f"pp {'+'.join(map(str, split))}"
            yield _mixed_gang(parts, how, max(stage_s, crossing_s), workload, **shape, kept_bytes=kept)
            if is_best and not layers:  # other ways save memory that is not short, and are no faster
                break


ANY_LAYERS = 10**6


@dataclass(frozen=True)
class StageCost:
    """What a pipeline stage costs by its layers: time and memory both grow by the same amount with each."""

    layer_s: float
    first_bytes: float
    """Bytes on each card with one layer."""
    layer_bytes: float
    """Bytes on each card for each further layer."""
    room_bytes: float

    @property
    def most_layers(self) -> int:
        """Largest number of layers that fits the cards."""
        if self.first_bytes > self.room_bytes:
            return 0
        if math.isinf(self.room_bytes):
            return ANY_LAYERS
        return 1 + int((self.room_bytes - self.first_bytes) / self.layer_bytes * (1 + 1e-12))


def _stage(
    workload: Workload, part: GangPart, num_nodes: int, tp: int, dp: int, zero: int, recompute: bool
) -> StageCost:
    num_layers = workload.model.num_layers
    seconds = compute_s(workload, part.flops(num_nodes), recompute=recompute) * bubble(workload, 2, dp)
    seconds += tp_s(workload, part.figures, part.fabric, tp, 1, dp)
    seconds += dp_s(workload, part.figures, part.fabric, tp, 1, dp, zero)
    one, two = (
        training_bytes(workload, tp, 2, dp, zero, recompute=recompute, layer_share=count / num_layers)
        for count in (1, 2)
    )
    return StageCost(seconds / num_layers, one, two - one, part.room_bytes)


def divided(
    workload: Workload, stages: Sequence[StageCost], layers: tuple[int, ...] = ()
) -> tuple[float, tuple[int, int]] | None:
    """Returns the seconds of the slower of two stages and the layers of each, for the best division that fits memory;
    None if none fits. `layers` fixes the division."""
    one, other = stages
    num_layers = workload.model.num_layers
    low, high = max(1, num_layers - other.most_layers), min(num_layers - 1, one.most_layers)
    if low > high:
        return None
    if layers:
        if not low <= layers[0] <= high:
            return None
        return max(layers[0] * one.layer_s, layers[1] * other.layer_s), (layers[0], layers[1])
    even = num_layers * other.layer_s / (one.layer_s + other.layer_s)
    found = []
    for count in (int(even), int(even) + 1):
        count = min(max(count, low), high)
        found.append((max(count * one.layer_s, (num_layers - count) * other.layer_s), (count, num_layers - count)))
    return min(found)


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
        for zero, recompute in fits(workload, min(one.room_bytes, other.room_bytes), tp, 1, dp, num_layers):
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
    step_s = _interrupted(step_s, [(part.machines, nodes) for part, nodes in parts])
    return Gang(
        name=f"{label} {how} tp{shape['tp']} dp{shape['dp']}" + ("" if shape["zero"] == 1 else f" zero{shape['zero']}"),
        nodes={part.machines.name: nodes for part, nodes in parts},
        root=root.name,
        step_s=step_s,
        publish_s=publish_s(workload, root),
        **shape,  # type: ignore[arg-type]
    )


def _interrupted(step_s: float, nodes: Sequence[tuple[MachineClass, int]]) -> float:
    """Mean seconds of a step if the provider takes nodes back: a lost node stops the whole gang until it is replaced,
    and half a step, on average, is trained again."""
    return step_s * sum(1 / up_share(machines, num, step_s / 2) - 1 for machines, num in nodes) + step_s


def from_the_other(gang: Gang, inventory: Inventory, workload: Workload) -> Gang:
    """Returns a copy of a gang of two classes, in which the other class (not `gang.root`) publishes the weights. That
    class may have faster links to the rollout nodes."""
    (root,) = gang.nodes.keys() - {gang.root}
    publish = publish_s(workload, inventory.classes[root])
    return replace(gang, name=f"{gang.name} from {root}", root=root, publish_s=publish)


Known = dict[tuple[object, ...], list[Gang]]
"""Cache of gangs for one workload and its constants, keyed by the gangs' classes and the links among these classes."""


def gangs(
    inventory: Inventory, workload: Workload, constants: Constants, known: Known | None = None
) -> tuple[Gang, ...]:
    """Returns training gangs on one or two classes of nodes, except gangs that another gang beats. `known` caches
    results between calls with the same workload and constants."""
    known = {} if known is None else known
    slack = (0.0, 0.0) if is_complete(inventory) else (MIN_GAIN, MIN_LEANER)
    classes = [machines for machines in inventory.classes.values() if machines.num_nodes > 0]
    alone: dict[str, list[Gang]] = {}
    for machines in classes:
        key = _key(inventory, machines)
        if key not in known:
            given = inventory, workload, constants
            sizes = node_grid(machines.num_nodes, 1.0 if is_complete(inventory) else NODES_GROWTH)
            every = itertools.chain(
                (gang for size in sizes for gang in _alone_on(machines, size, *given)),
                on_part_of_a_node(machines, *given),
            )
            known[key] = fastest_first_front(every, *slack)
        alone[machines.name] = known[key]
    found = [gang for front in alone.values() for gang in front]
    for one, other in combinations(classes, 2) if workload.any_trainer else ():
        key = _key(inventory, one, other)
        if key not in known:
            rivals = [*alone[one.name], *alone[other.name]]
            both = mixed(one, other, inventory, workload, constants)
            pairs = (each for gang in both for each in (gang, from_the_other(gang, inventory, workload)))
            front = fastest_first_front([*rivals, *pairs], *slack)
            known[key] = [gang for gang in front if len(gang.nodes) > 1]
        found += known[key]
    if not found:
        raise UserError(_too_large(classes, workload, constants))
    return tuple(found)


def _key(inventory: Inventory, *classes: MachineClass) -> tuple[object, ...]:
    """Cache key: everything in the inventory that gangs on these classes depend on."""
    names = [machines.name for machines in classes]
    links = (inventory.links.get(frozenset((one, other))) for one in names for other in names)
    return (is_complete(inventory), *classes, *links)


def on_part_of_a_node(
    machines: MachineClass, inventory: Inventory, workload: Workload, constants: Constants
) -> Iterator[Gang]:
    """Yields gangs that train on some cards of one node and leave the others to replicas, if the workload allows both
    on a node. With staleness bound 0, all cards do both in turn instead."""
    if not workload.shares_nodes or not is_complete(inventory):
        return
    for num_cards in range(1, machines.per_node):
        yield from _alone_on(machines, 1, inventory, workload, constants, num_cards)


def over_links(gang: Gang, inventory: Inventory, workload: Workload, constants: Constants) -> Gang:
    """Returns `gang` with its step time computed again, for the links of `inventory`. Its parallelism does not
    change."""
    parts = tuple((inventory.classes[name], num_nodes) for name, num_nodes in gang.nodes.items())
    if len(parts) == 1:
        same = _alone_on(*parts[0], inventory, workload, constants, gang.tp * gang.pp * gang.dp)
    else:
        one, other = ((part_of(each, inventory, workload, constants), num) for each, num in parts)
        link = inventory.link(*gang.nodes)
        if gang.batch_shares:
            same = replicated((one, other), link, workload)
        else:
            same = pipelined((one, other), link, workload, gang.layers)
    # If two gangs of this shape differ only in recomputing, `fastest_first_front` kept the faster one.
    shape = (gang.tp, gang.pp, gang.dp, gang.zero)
    ways = (each for each in same if (each.tp, each.pp, each.dp, each.zero) == shape)
    return replace(gang, step_s=min(each.step_s for each in ways))


@functools.lru_cache(maxsize=8192)
def crossing_share(groups_per_node: int, pp: int, dp: int, is_shared: bool) -> float:
    """Largest share of a stage's activations that one node sends to the next stage, or receives from the one before. If
    `is_shared`, returns the largest share that leaves any node, because all nodes use one link. Groups of a stage lie
    on nodes in order; every stage has `dp` of them."""
    first = np.arange((pp - 1) * dp)
    here, there = first // groups_per_node, (first + dp) // groups_per_node
    leaves = here != there
    if not leaves.any():
        return 0.0
    stage, here, there = (first // dp)[leaves], here[leaves], there[leaves]
    if is_shared:
        return float(np.bincount(stage).max()) / dp
    most = max(np.unique(stage * (len(first) + dp) + each, return_counts=True)[1].max() for each in (here, there))
    return float(most) / dp


def _alone_on(
    machines: MachineClass,
    num_nodes: int,
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    num_cards: int | None = None,
) -> Iterator[Gang]:
    """Yields a gang for every split of `num_nodes` nodes into tensor, pipeline and data parallelism that fits into
    memory. `num_cards` is the number of cards that train (None: all of them)."""
    figures, card = constants.of(machines.accelerator.name), machines.accelerator
    fabric = fabric_of(machines, inventory)
    is_part = num_cards is not None and num_cards < num_nodes * machines.per_node
    num_cards = num_cards or num_nodes * machines.per_node
    root, after_s = machines.name, publish_s(workload, machines) * max(1.0, machines.per_node / num_cards)
    link = inventory.links.get(frozenset((root,)))
    for tp in tensor_parallels(workload, machines) if workload.any_trainer else [1]:
        most = min(workload.model.num_layers, num_cards // tp) if workload.any_trainer else 1
        for pp in range(1, most + 1):
            dp, rest = divmod(num_cards, tp * pp)
            if rest or dp > max_replicas(workload):
                continue
            layers = split_layers(workload.model.num_layers, [1.0] * pp)
            flops = num_cards * card.flops * figures.training_share
            fullest = workload.model.num_layers / max(layers)  # number of stages if all were as long as the longest
            for zero, recompute in fits(workload, usable_bytes(card, figures), tp, pp, dp, max(layers)):
                step_s = compute_s(workload, flops, recompute=recompute) * bubble(workload, pp, dp) * pp / fullest
                step_s += tp_s(workload, figures, fabric, tp, fullest, dp)
                step_s += dp_s(workload, figures, fabric, tp, fullest, dp, zero)
                if link is not None and pp > 1:
                    share = crossing_share(machines.per_node // tp, pp, dp, link.is_shared)
                    step_s = max(step_s, boundary_s(workload, link.bytes_per_s, 1) * share)
                step_s = _interrupted(step_s, [(machines, num_nodes)])
                size = f"{num_cards} cards" if is_part else f"x{num_nodes}"
                name, nodes = f"{root} {size} tp{tp} pp{pp} dp{dp}", {root: num_nodes}
                name += "" if zero == 1 else f" zero{zero}"
                kept = kept_by_class(workload, {root: (tp, fullest)}, dp, zero)
                home = {root: num_nodes * machines.per_node - num_cards} if is_part else None
                yield Gang(
                    name,
                    nodes,
                    root,
                    step_s,
                    after_s,
                    tp,
                    pp,
                    dp,
                    layers,
                    zero=zero,
                    kept_bytes=kept,
                    home_cards=home,
                )


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
            for tp in (tensor_parallels(workload, machines) if workload.any_trainer else [1])
        )
    if not needs:
        return "the cluster has no nodes; give at least one class 1 node or more"
    least = min(needs, key=lambda name: needs[name])
    remedy = f"class {least} would need {needs[least] / 1e9:.1f} GB per accelerator, or more nodes"
    if not workload.any_trainer:
        remedy += "; --any-trainer also tries tensor and pipeline parallelism, which Offbeat's own trainer lacks"
    return f"model {workload.model.name}: no class of machines has enough memory to train it; {remedy}"
