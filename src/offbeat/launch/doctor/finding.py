"""A finding: one thing to say about this machine, how much it matters, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from offbeat.config.arithmetic import size


class Level(StrEnum):
    FINE = "fine"
    ABSENT = "absent"
    """Not there, and not needed."""
    WARNS = "warns"
    """The run starts, and somebody will be sorry."""
    STOPS = "stops"
    """The configuration cannot run."""


@dataclass(frozen=True)
class Finding:
    about: str
    told: str
    level: Level = Level.FINE
    remedy: str = ""
    """Words to type or a key to change."""


def room(free: int | None, total: int) -> str:
    return size(total) if free is None else f"{size(free)} free of {size(total)}"
