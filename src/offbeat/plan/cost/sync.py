"""Seconds from a version's publication until machines sample from it, and how many of them generation stands still.

Ours: pieces are relayed. One copy crosses the link between two classes, whoever has a piece passes it on, and engines
go on generating until the new weights lie beside the old ones. The rival's: several whole copies over the slow link,
while generation stands still.
"""

from __future__ import annotations

from offbeat.plan.cost.constants import Figures
from offbeat.plan.cost.sizes import trained_parameters, update_bytes
from offbeat.plan.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.plan.shapes import num_parameters, weight_bytes
from offbeat.plan.workload import Workload

CHUNK_BYTES = 16 * 2**20
"""A node passes a piece on once it has all of it: the size of our pieces."""


def widest_ways(inventory: Inventory, root: str) -> dict[str, Link]:
    """By class: the way to it over whatever classes have nodes whose narrowest link is widest, as one link.

    What a plan can reach at best: whether the classes on the way are part of it is not known before it is there.
    """
    ways: dict[str, Link] = {}
    missing = {name for name, machines in inventory.classes.items() if machines.num_nodes and name != root}
    steps = {name: inventory.link(root, name) for name in missing}
    while missing:
        name = max(sorted(missing), key=lambda name: (steps[name].bytes_per_s, -steps[name].latency_s))
        missing.remove(name)
        ways[name] = steps[name]
        for far in missing:
            on, so_far = inventory.link(name, far), ways[name]
            over = Link(min(so_far.bytes_per_s, on.bytes_per_s), so_far.latency_s + on.latency_s)
            if over.bytes_per_s > steps[far].bytes_per_s:
                steps[far] = over
    return ways


def relay_s(workload: Workload, inventory: Inventory, root: str, receiver: str, num_nodes: int) -> float:
    """Over the widest way between both classes once, then from node to node of the receiving class, in pieces."""
    if root == receiver and frozenset((root,)) not in inventory.links:
        return 0.0  # a class of one node: there is nobody to send to
    first = inventory.link(root, receiver) if root == receiver else widest_ways(inventory, root)[receiver]
    time_s = update_bytes(workload) / first.bytes_per_s + first.latency_s
    if num_nodes > 1:
        within = inventory.link(receiver, receiver)
        slowest = min(first.bytes_per_s, within.bytes_per_s)
        time_s = update_bytes(workload) / slowest + first.latency_s
        time_s += (num_nodes - 1) * (CHUNK_BYTES / within.bytes_per_s + within.latency_s)
    return time_s


def copies_s(workload: Workload, inventory: Inventory, root: str, receiver: str, num_copies: float) -> float:
    """Whole copies over one link, one after the other; all of it blocks."""
    return num_copies * update_bytes(workload) / inventory.link(root, receiver).bytes_per_s


def swap_s(workload: Workload, card: Accelerator, figures: Figures, tp: int, spare_bytes: float) -> float:
    """What of a relayed update blocks a replica: a change of pointers where a second set fits, else a load from the
    host's memory, each card its own part."""
    incoming_bytes = trained_parameters(workload) * workload.model.bytes_per_weight / tp
    if incoming_bytes <= spare_bytes:
        return figures.swap_s
    return figures.swap_s + incoming_bytes / card.host_bytes_per_s


def publish_s(workload: Workload, root: MachineClass) -> float:
    """What publishing adds to a training step: the cards of one node bring the new weights to the host together."""
    share = trained_parameters(workload) / num_parameters(workload.model)
    return share * weight_bytes(workload.model) / (root.per_node * root.accelerator.host_bytes_per_s)
