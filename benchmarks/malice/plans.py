"""Instructions for the processes of honest workers and of adversaries, which come as the first line of input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HonestPlan:
    """Names, place and pace of honest workers."""

    url: str
    folder: str
    tokens: dict[str, str]
    """Join tokens by the names of the workers."""
    num_slots: int
    step_s: float


@dataclass(frozen=True)
class AttackPlan:
    """Target and duration of an attack."""

    url: str
    folder: str
    honest: list[str]
    used_token: str
    titles: list[str]
    """Titles of the adversaries that attack; empty: all."""
    tokens: list[str]
    """Join tokens, as many as `adversaries.num_tokens` returns."""
    seconds: float
    seed: int
