"""All training gangs worth a look: whole nodes of one class, or of two by pipeline or by data parallelism.

Guarantees: every gang fits the memory of each of its cards; tensor parallelism stays inside a node, collectives
inside a zone; no gang is left that another beats with no more nodes of any class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from offbeat.errors import UserError
from offbeat.plan.columns.fronts import fastest_first_front
from offbeat.plan.columns.gang_shapes import fabric_of, fits, kept_by_class, max_replicas, node_grid, split_layers
from offbeat.plan.columns.mixed_gangs import from_the_other, mixed, part_of, pipelined, replicated
from offbeat.plan.columns.rollout import tensor_parallels
from offbeat.plan.cost.constants import Constants
from offbeat.plan.cost.memory import training_bytes, usable_bytes
from offbeat.plan.cost.sync import publish_s
from offbeat.plan.cost.training import bubble, compute_s, dp_s, tp_s
from offbeat.plan.inputs.hardware import Inventory, MachineClass
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.problem import Gang

PIPELINES = (1, 2, 4, 8, 16)


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
            front = fastest_first_front([*rivals, *mixed(one, other, inventory, workload, constants)])
            kept = [gang for gang in front if len(gang.nodes) > 1]
            known[key] = [each for gang in kept for each in (gang, from_the_other(gang, inventory, workload))]
        found += known[key]
    if not found:
        raise UserError(_too_large(classes, workload, constants))
    return tuple(found)


def _key(inventory: Inventory, *classes: MachineClass) -> tuple[object, ...]:
    """All of an inventory that gangs on these classes depend on."""
    names = [machines.name for machines in classes]
    return (*classes, *(inventory.links.get(frozenset((one, other))) for one in names for other in names))


def over_links(gang: Gang, inventory: Inventory, workload: Workload, constants: Constants) -> Gang:
    """The same gang on the same nodes, with the step that an inventory's links give it."""
    parts = tuple((inventory.classes[name], num_nodes) for name, num_nodes in gang.nodes.items())
    if len(parts) == 1:
        same = _alone_on(*parts[0], inventory, workload, constants)
    else:
        one, other = ((part_of(each, inventory, workload, constants), num) for each, num in parts)
        make = replicated if gang.batch_shares else pipelined
        same = make((one, other), inventory.link(*gang.nodes), workload)
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
            fullest = workload.model.num_layers / max(layers)  # of its stages would be the model
            for zero, recompute in fits(workload, usable_bytes(card, figures), tp, pp, dp, max(layers)):
                step_s = compute_s(workload, flops, recompute=recompute) * bubble(workload, pp, dp) * pp / fullest
                step_s += tp_s(workload, figures, fabric, tp, fullest, dp)
                step_s += dp_s(workload, figures, fabric, tp, fullest, dp, zero)
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
                    kept_bytes=kept_by_class(workload, {machines.name: (tp, fullest)}, dp, zero),
                )


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
