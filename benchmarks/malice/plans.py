"""What the processes of honest workers and of adversaries are told, each as the first line of its input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HonestPlan:
    """Who works where, and how fast."""

    url: str
    folder: str
    tokens: dict[str, str]
    """Join tokens by the names of the workers."""
    num_slots: int
    step_s: float


@dataclass(frozen=True)
class AttackPlan:
    """Whom to attack, and how long."""

    url: str
    folder: str
    honest: list[str]
    used_token: str
    titles: list[str]
    """Of the adversaries that attack; none: all of them."""
    tokens: list[str]
    """As many as `adversaries.num_tokens` says."""
    seconds: float
    seed: int
