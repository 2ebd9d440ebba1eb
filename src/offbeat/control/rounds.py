"""What rounds of generation would give at an over-provision factor: the event model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.control.law import Law
from offbeat.control.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Setting:
    """What does not change from round to round."""

    groups_per_step: int
    group_size: int
    bound: int
    """S: a group begun S steps ago is waited for."""
    prompt_tokens: float = 0
    slots: int | None = None
    """Rows that can run at once; None: all."""
    max_context_tokens: float | None = None
    """Keys and values that there is room for, in tokens in flight; None: enough."""
    gate: Literal["strict", "release"] = "strict"
    """A round ends with groups_per_step whole groups, or with as many samples."""
    resumes: bool = False
    """Whether a trajectory goes on from kept keys and values; otherwise its whole prefix is prefilled again."""
    pads: bool = False
    """Whether a step reads rows times the longest context."""
    update_s: float = 0.0
    """From the end of a round to the begin of the next."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A group that is carried over into the coming round."""

    age: int
    """Steps since it was begun; 1: in the round before."""
    num_tokens: tuple[int, ...]
    """A member so far."""
    ended: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is predicted of a factor, on average over rounds."""

    tokens_per_s: float
    """Generated, all of which are delivered in the long run."""
    step_s: float
    """A round and the update after it."""
    off_policy_share: float
    """Of the delivered tokens."""
    staleness_p50: int
    staleness_p95: int
    staleness_max: int
    reprefill_share: float
    """Of the time."""
    mean_rows: float
    max_context_tokens: float
    """In flight at most."""


def outlook(
    setting: Setting,
    step_time: StepTime,
    law: Law,
    factor: float,
    *,
    seed: int,
    num_rounds: int = 12,
    survivors: Sequence[Survivor] = (),
) -> Outlook:
    """Of rounds in which `factor` times groups_per_step groups are alive at first."""
    raise NotImplementedError
