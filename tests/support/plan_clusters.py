"""Small inventories for tests of placement."""

from __future__ import annotations

from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass

H800 = Accelerator("H800", 756e12, 80e9, 2e12, 200e9, 64e9)
H20 = Accelerator("H20", 148e12, 96e9, 4e12, 450e9, 64e9)
GB = 1e9


def machines(name: str, num_nodes: int, card: Accelerator = H20, per_node: int = 8, zone: str = "here") -> MachineClass:
    return MachineClass(name, card, per_node, num_nodes, 1.0, zone)


def cluster(counts: dict[str, int], near: float = 5 * GB, far: float = 1.5 * GB, shared: bool = False) -> Inventory:
    """Classes of alike nodes: `near` inside each of them, `far` between any two."""
    classes = {name: machines(name, num) for name, num in counts.items()}
    links = {frozenset((one, other)): Link(near if one == other else far, is_shared=shared and one != other)
             for one in counts for other in counts}  # fmt: skip
    return Inventory(classes, links)
