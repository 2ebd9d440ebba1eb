"""Seconds from a version's publication until machines sample from it, and how many of them generation stands still.

Ours: pieces are relayed. One copy crosses the link between two classes, whoever has a piece passes it on, and engines
go on generating until the new weights lie beside the old ones. The rival's: several whole copies over the slow link,
while generation stands still.
"""

from __future__ import annotations

import math

from offbeat.plan.cost.constants import Figures
from offbeat.plan.cost.sizes import trained_parameters, update_bytes
from offbeat.plan.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.plan.inputs.shapes import num_parameters, weight_bytes
from offbeat.plan.inputs.workload import Workload

CHUNK_BYTES = 16 * 2**20
"""A node passes a piece on once it has all of it: the size of our pieces."""
MAX_FAN_OUT = 8
MIN_TWO_TREES = 3
"""Nodes: with fewer both trees are one."""


def relay_s(
    workload: Workload, inventory: Inventory, root: str, receiver: str, num_nodes: int, over: str | None = None
) -> float:
    """Over the link between both classes once, or over a node of a third class, then from node to node of the
    receiving class, in pieces."""
    if root == receiver and (num_nodes == 1 or frozenset((root,)) not in inventory.links):
        return 0.0  # a class of one node: there is nobody to send to
    first = inventory.link(root, receiver) if over is None else _joined(inventory, root, over, receiver)
    if num_nodes == 1:
        return update_bytes(workload) / first.bytes_per_s + first.latency_s
    within = inventory.link(receiver, receiver)
    told = update_bytes(workload), first.bytes_per_s, within, num_nodes
    return first.latency_s + min(one_tree_s(*told), two_trees_s(*told))


def _joined(inventory: Inventory, root: str, over: str, receiver: str) -> Link:
    """Two links one after the other, the node between passing each piece on once it has all of it."""
    one, other = inventory.link(root, over), inventory.link(over, receiver)
    return Link(
        min(one.bytes_per_s, other.bytes_per_s),
        one.latency_s + other.latency_s + CHUNK_BYTES / max(one.bytes_per_s, other.bytes_per_s),
    )


def one_tree_s(
    num_bytes: float, arriving: float, within: Link, num_nodes: int, chunk_bytes: float = CHUNK_BYTES
) -> float:
    """Until all of so many nodes have what arrives at the first of them, each passing every piece on to as many more
    as is best."""
    width = fan_out(num_bytes, arriving, within, num_nodes, chunk_bytes)
    return _spread_s(num_bytes, arriving, within, num_nodes, width, chunk_bytes)


def fan_out(num_bytes: float, arriving: float, within: Link, num_nodes: int, chunk_bytes: float = CHUNK_BYTES) -> int:
    """To how many each should pass every piece on."""

    def seconds(width: int) -> float:
        return _spread_s(num_bytes, arriving, within, num_nodes, width, chunk_bytes)

    return min(range(1, MAX_FAN_OUT + 1), key=lambda width: (seconds(width), width))


def _spread_s(num_bytes: float, arriving: float, within: Link, num_nodes: int, width: int, chunk_bytes: float) -> float:
    """More of them make it shallower, and slower once a node's port is full."""
    depth, covered, layer = 0, 1, 1
    while covered < num_nodes:
        layer *= width
        covered += layer
        depth += 1
    each = within.bytes_per_s / min(width, num_nodes - 1)
    return num_bytes / min(arriving, each) + depth * (chunk_bytes / each + within.latency_s)


def two_trees_s(
    num_bytes: float, arriving: float, within: Link, num_nodes: int, chunk_bytes: float = CHUNK_BYTES
) -> float:
    """The same along two binary trees that carry half of the pieces each. Who passes pieces on in one is a leaf of the
    other, so that every port carries the version once however many nodes there are."""
    if num_nodes < MIN_TWO_TREES:
        return math.inf
    each = within.bytes_per_s / 2
    depth = 1 + int(math.log2(num_nodes - 1))
    return num_bytes / min(arriving, within.bytes_per_s) + depth * (chunk_bytes / each + within.latency_s)


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


def wake_s(workload: Workload, card: Accelerator, figures: Figures, tp: int) -> float:
    """Until a replica whose memory training had in the meantime generates again: all weights come from the host."""
    return figures.swap_s + weight_bytes(workload.model) / tp / card.host_bytes_per_s


def publish_s(workload: Workload, root: MachineClass) -> float:
    """What publishing adds to a training step: the cards of one node bring the new weights to the host together."""
    share = trained_parameters(workload) / num_parameters(workload.model)
    return share * weight_bytes(workload.model) / (root.per_node * root.accelerator.host_bytes_per_s)
