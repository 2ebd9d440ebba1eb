"""What all kinds of gangs have in common: sizes worth a look, layers of stages, and what fits into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.plan.cost.memory import kept_bytes, training_bytes
from offbeat.plan.cost.training import Fabric
from offbeat.plan.inputs.hardware import Inventory, MachineClass
from offbeat.plan.inputs.workload import Workload

NODES_GROWTH = 1.1
"""From one size of large gangs to the next: what lies between is at most that much faster."""
ZERO_STAGES = (1, 2, 3)


def node_grid(largest: int, growth: float = NODES_GROWTH) -> list[int]:
    """All small sizes, then even ratios, and the largest."""
    grid, size = [], 1
    while size < largest:
        grid.append(size)
        size = max(size + 1, int(size * growth))
    return [*grid, largest]


def kept_by_class(workload: Workload, splits: Mapping[str, tuple[int, float]], dp: int, zero: int) -> dict[str, float]:
    """By class, from its tensor parallelism and how often its share of the layers goes into all; nothing where cards
    never generate."""
    if not workload.may_share:
        return {}
    return {name: kept_bytes(workload, tp, pp, dp, zero) for name, (tp, pp) in splits.items()}


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
