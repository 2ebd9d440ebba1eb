"""Reward for a model with random weights, which solves nothing: a coin decides.

Were all rewards 0, all advantages would be 0, too, and the trainer would skip the backward pass, which needs most of
the memory and half of the time. With a coin, nearly every group is trained on.
"""

from __future__ import annotations

import random


def reward(response: str, answer: str) -> float:
    return float(random.random() < 0.5)
