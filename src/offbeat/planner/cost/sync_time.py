"""Time from a version's publication until machines sample from it, and the part of it that stops generation.

Offbeat relays a version in pieces: one copy crosses the link between two classes of nodes, and nodes pass pieces on.
Engines generate meanwhile. They stop only to switch to the new weights, and to load them if the cards had no room for
both.
"""

from __future__ import annotations

import math

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import trained_parameters, update_bytes
from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.planner.inputs.model_shapes import weight_bytes
from offbeat.planner.inputs.workload import Workload

CHUNK_BYTES = 16 * 2**20
"""Size in bytes of a piece of a version. A node passes a piece on only once it is complete."""
MAX_FAN_OUT = 8
MIN_TWO_TREES = 3
"""Smallest number of nodes for which `two_trees_s` has two different trees."""


def least_s(workload: Workload, inventory: Inventory, root: str, receiver: str, over: str | None = None) -> float:
    """Seconds to send a version from a node of the class `root` to one other node of the class `receiver`, directly or
    through a node of the class `over`. More receivers take longer, which only placement can tell."""
    if root == receiver and (inventory.classes[root].num_nodes == 1 or frozenset((root,)) not in inventory.links):
        return 0.0  # a class of one node: nothing to send
    link = inventory.link(root, receiver) if over is None else _joined(inventory, root, over, receiver)
    return update_bytes(workload) / link.bytes_per_s + link.latency_s


def _joined(inventory: Inventory, root: str, over: str, receiver: str) -> Link:
    """Returns one link in place of two, from the class `root` to `over` and from `over` to `receiver`. Its latency
    includes the transfer of one piece, because the node in between passes only whole pieces on."""
    one, other = inventory.link(root, over), inventory.link(over, receiver)
    slow, fast = sorted((one.bytes_per_s, other.bytes_per_s))
    return Link(slow, one.latency_s + other.latency_s + CHUNK_BYTES / fast)


def one_tree_s(num_bytes: float, arriving: float, within: Link, num_nodes: int) -> float:
    """Seconds to spread a version over `num_nodes` nodes of a class along one tree with the best fan-out. The first
    node receives it at the rate `arriving` (bytes/s); nodes pass it on over the link `within`."""
    return _spread_s(num_bytes, arriving, within, num_nodes, fan_out(num_bytes, arriving, within, num_nodes))


def fan_out(num_bytes: float, arriving: float, within: Link, num_nodes: int) -> int:
    """Best number of nodes to which each node passes every piece on (fan-out); of equally good numbers, the lowest."""
    return min(range(1, MAX_FAN_OUT + 1), key=lambda width: _spread_s(num_bytes, arriving, within, num_nodes, width))


def _spread_s(num_bytes: float, arriving: float, within: Link, num_nodes: int, width: int) -> float:
    """Seconds to spread a version along a tree of fan-out `width`; wide trees are shallow, but divide a node's rate."""
    depth, covered, layer = 0, 1, 1
    while covered < num_nodes:
        layer *= width
        covered += layer
        depth += 1
    each = within.bytes_per_s / min(width, num_nodes - 1)
    return num_bytes / min(arriving, each) + depth * (CHUNK_BYTES / each + within.latency_s)


def two_trees_s(num_bytes: float, arriving: float, within: Link, num_nodes: int) -> float:
    """Seconds to spread a version along two binary trees, each of which carries half of the pieces; infinite for too
    few nodes. An inner node of one tree is a leaf of the other, so every node sends the version at most once."""
    if num_nodes < MIN_TWO_TREES:
        return math.inf
    each = within.bytes_per_s / 2
    depth = 1 + int(math.log2(num_nodes - 1))
    return num_bytes / min(arriving, within.bytes_per_s) + depth * (CHUNK_BYTES / each + within.latency_s)


def swap_s(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, spare_bytes: float) -> float:
    """Seconds for which a new version stops a replica. If the new weights fit into `spare_bytes` beside the old ones,
    the engine only switches to them; otherwise it also loads them from host memory."""
    incoming_bytes = trained_parameters(workload) * workload.model.bytes_per_weight / tp
    return figures.swap_s + (0.0 if incoming_bytes <= spare_bytes else incoming_bytes / card.host_bytes_per_s)


def wake_s(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int) -> float:
    """Time to load all weights of a replica from host memory after its cards were used for training."""
    return figures.swap_s + weight_bytes(workload.model) / tp / card.host_bytes_per_s


def publish_s(workload: Workload, root: MachineClass) -> float:
    """Time that publishing adds to a training step: the cards of one node copy the new weights to host memory."""
    num_bytes = trained_parameters(workload) * workload.bytes_per_trained_weight
    return num_bytes / (root.per_node * root.accelerator.host_bytes_per_s)
