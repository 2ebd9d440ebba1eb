"""Whether a group has ended, and how.

Duty: a failed member is left out while enough remain; a group that cannot reach that number any more has failed at
once, without waiting for the members still under way. A group whose members all earned the same teaches nothing; it may
be dropped for another prompt, so many times for a step and no more: a policy that solves every prompt, or none, still
gets its batches.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

MAX_RETRIES = 1
"""A prompt whose group failed is tried once more: a second failure is the prompt's own, not the weather's."""
EQUAL_WITHIN = 1e-8
"""Rewards closer than this count as equal."""


class Verdict(StrEnum):
    OPEN = "open"
    """Members are still under way."""
    READY = "ready"
    """Every member ended and enough were scored."""
    FAILED = "failed"
    """Too few members can still be scored."""
    NO_SIGNAL = "no_signal"
    """It would be ready, but nothing can be learnt from it, and another may take its place."""


class Terms(NamedTuple):
    """What a run asks of its groups."""

    min_group: int
    """Members that must remain."""
    max_no_signal: float = 0
    """Groups without a signal that may be dropped for a step."""


def settle(size: int, num_scored: int, num_failed: int, min_group: int) -> Verdict:
    """The verdict on a group; a group smaller than `min_group` needs all of its members."""
    if size - num_failed < min(min_group, size):
        return Verdict.FAILED
    return Verdict.READY if num_scored + num_failed == size else Verdict.OPEN


def settle_ready(spread: float, num_before: int, max_no_signal: float) -> Verdict:
    """The verdict on a group that is ready: `spread` lies between its lowest and its highest reward.

    `num_before` says how far its step has come. Where steps take groups by ordinal these are the groups of lower
    ordinals that were drawn for the step, so that the verdict does not depend on what arrived first; where they take
    what is finished, the groups that were dropped since the last batch was chosen.
    """
    return Verdict.NO_SIGNAL if spread <= EQUAL_WITHIN and num_before < max_no_signal else Verdict.READY
