"""The learning rate at a step: warm-up, then constant, linear or cosine decay to zero at the last step."""

from __future__ import annotations

import math


def learning_rate(step: int, lr: float, schedule: str, warmup_steps: int, num_steps: int) -> float:
    """The rate used to train from `step`; the first warm-up step already moves."""
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    if schedule == "constant":
        return lr
    if schedule == "linear":
        return lr * (1 - done)
    assert schedule == "cosine", f"unknown schedule {schedule}"
    return lr * 0.5 * (1 + math.cos(math.pi * done))
