"""Eq. 3 of AReaL-Hex: which nodes train, by link bandwidth inside training and memory bandwidth inside rollout.

Gaps of the paper that are filled here: the unit is a node, since its tensor-parallel groups never leave one; nodes of a
class are alike, so a bisection is a number of training nodes per class; a pair of cards counts with the bandwidth
between them. A share of FLOPS counts as gamma within half of the smallest node's share, else the nearest one is taken.
Where there are more bisections than MAX_SPLITS, each class is divided at evenly spaced numbers of nodes only.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offbeat.planner.inputs.hardware import Inventory

MAX_SPLITS = 20_000


@dataclass(frozen=True)
class Bisections:
    """All bisections of a cluster with what eq. 3 says of them."""

    names: tuple[str, ...]
    training: np.ndarray
    """Nodes that train, a row per bisection, a column per class."""
    value: np.ndarray
    flops_share: np.ndarray
    tolerance: float

    def at(self, gamma: float) -> dict[str, int]:
        """The best bisection whose share of FLOPS in training is gamma, or the nearest to it."""
        distance = np.abs(self.flops_share - gamma)
        allowed = distance <= max(self.tolerance, float(distance.min()) + 1e-12)
        best = int(np.argmax(np.where(allowed, self.value, -np.inf)))
        return {name: int(num) for name, num in zip(self.names, self.training[best], strict=True)}


def bisections(inventory: Inventory) -> Bisections:
    classes = list(inventory.classes.values())
    levels = [np.arange(one.num_nodes + 1) for one in classes]
    per_class = int(MAX_SPLITS ** (1 / len(classes)))
    if np.prod([float(len(level)) for level in levels]) > MAX_SPLITS:
        levels = [np.unique(np.round(np.linspace(0, level[-1], per_class)).astype(int)) for level in levels]
    training = np.array(list(itertools.product(*levels)))
    offered = np.array([one.num_nodes for one in classes])
    total = link_bandwidth(inventory, offered[None, :])[0]
    memory = np.array([one.per_node * one.accelerator.memory_bytes_per_s for one in classes])
    flops = np.array([one.per_node * one.accelerator.flops for one in classes])
    value = link_bandwidth(inventory, training) / total + (offered - training) @ memory / (offered @ memory)
    return Bisections(
        tuple(one.name for one in classes),
        training,
        value,
        training @ flops / (offered @ flops),
        float(flops.min() / (offered @ flops)) / 2,
    )


def link_bandwidth(inventory: Inventory, nodes: np.ndarray) -> np.ndarray:
    """Summed over all pairs of cards within so many nodes of each class."""
    classes = list(inventory.classes.values())
    total = np.zeros(len(nodes))
    for i, one in enumerate(classes):
        pairs = one.per_node * (one.per_node - 1) / 2
        total += nodes[:, i] * pairs * one.accelerator.link_bytes_per_s
        for j, other in enumerate(classes[: i + 1]):
            num_pairs = nodes[:, i] * (nodes[:, i] - 1) / 2 if i == j else nodes[:, i] * nodes[:, j]
            rate = inventory.link(one.name, other.name).bytes_per_s
            total += num_pairs * one.per_node * other.per_node * rate
    return total


def rest(inventory: Inventory, training: Mapping[str, int]) -> dict[str, int]:
    """The nodes that are left to the rollouts."""
    return {name: one.num_nodes - training.get(name, 0) for name, one in inventory.classes.items()}
