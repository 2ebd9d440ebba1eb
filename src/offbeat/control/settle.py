"""Whether a group has ended, and how.

Duty: a failed member is left out while enough remain; a group that cannot reach that number any more has failed at
once, without waiting for the members still under way.
"""

from __future__ import annotations

from enum import StrEnum

MAX_RETRIES = 1
"""A prompt whose group failed is tried once more: a second failure is the prompt's own, not the weather's."""


class Verdict(StrEnum):
    OPEN = "open"
    """Members are still under way."""
    READY = "ready"
    """Every member ended and enough were scored."""
    FAILED = "failed"
    """Too few members can still be scored."""


def settle(size: int, num_scored: int, num_failed: int, min_group: int) -> Verdict:
    """The verdict on a group; a group smaller than `min_group` needs all of its members."""
    if size - num_failed < min(min_group, size):
        return Verdict.FAILED
    return Verdict.READY if num_scored + num_failed == size else Verdict.OPEN
