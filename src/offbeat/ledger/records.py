"""What goes into the ledger and comes out of it: lifecycles and plain records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from offbeat.trajectory import End, Reward, Sampling, Trajectory


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    """Never claimed, never trained on."""


class GroupState(StrEnum):
    """Life of a group. A group ends once, as trained, evaluated or dropped; a resume from an older checkpoint takes
    back the batches that it forgets, and with them `trained`."""

    OPEN = "open"
    """Members are under way."""
    READY = "ready"
    """Every member ended, and enough were scored to train on."""
    CLAIMED = "claimed"
    """In the batch of a step that is not committed."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    """The end of an evaluation group."""
    DROPPED = "dropped"
    """Ended without training; `reason` says why."""


ALIVE = (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)


class Drop(StrEnum):
    """Why a group was dropped."""

    FAILED = "failed"
    """Too few members remained; re-issued once, with another seed."""
    STALE = "stale"
    """No token was left that may be trained; re-issued."""
    ABANDONED = "abandoned"
    """A resume left its version behind; re-issued with the same seed, so that equal weights give equal tokens."""
    NO_SIGNAL = "no_signal"
    """Its members all earned the same; another prompt takes its place."""


class TaskState(StrEnum):
    """Life of a task. `failed` without a trajectory came from a worker; with one, from the reward."""

    OPEN = "open"
    LEASED = "leased"
    ACCEPTED = "accepted"
    """Its trajectory is stored, its reward is not."""
    SCORED = "scored"
    FAILED = "failed"
    DROPPED = "dropped"
    """Its group was dropped before the task was scored."""


class BatchState(StrEnum):
    CLAIMED = "claimed"
    TRAINED = "trained"
    UNDONE = "undone"
    """A resume from an older checkpoint forgot this step; the row stays as history."""


class Outcome(StrEnum):
    """What became of a submission."""

    STORED = "stored"
    REPEATED = "repeated"
    """The very same trajectory was there already; nothing changed."""
    LATE = "late"
    """Its task had ended without it. It is kept, and its tokens count as wasted."""
    PARTIAL = "partial"
    """It is kept as the beginning of its task, which is open again."""


class Submission(NamedTuple):
    """A trajectory, whole or partial, as a worker hands it in under the fence of its lease."""

    trajectory: Trajectory
    worker: str
    fence: int


REWARD_FAILED = "reward"
"""Reason of a task whose reward could not be computed."""
WORKER_LOST = "lost"
"""Reason of a task whose workers vanished `max_attempts` times."""


class Drawn(NamedTuple):
    """Where a group's prompt comes from, and which of the prompt's groups it is."""

    source: str
    source_ordinal: int
    sibling: int


@dataclass(frozen=True)
class Cursor:
    """How far the data was drawn; re-issues are not counted."""

    next_ordinal: int
    drawn: Mapping[str, int]
    """From each source, one past the highest ordinal drawn."""
    last: Drawn | None = None
    """The group drawn last, whose prompt may want more of them."""


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """A prompt to admit. Training groups are numbered without a gap by `ordinal`; evaluation groups within their round,
    which is that of the step of `require_version`."""

    ordinal: int
    source: str
    source_ordinal: int
    prompt_tokens: np.ndarray
    problem: Mapping[str, Any]
    reward: str
    seed: int
    size: int
    sampling: Sampling
    sibling: int = 0
    """Which of its prompt's groups it is: 0, unless the group drawn just before has the same prompt."""
    purpose: Purpose | str = Purpose.TRAIN
    require_version: int | None = None


@dataclass(frozen=True)
class Unscored:
    """A trajectory that waits for its reward."""

    task: int
    group: int
    purpose: Purpose
    problem: Mapping[str, Any]
    reward: str
    response_tokens: np.ndarray
    end: End
    seq: int
    """Order of acceptance; pass the last one seen as `after` to get only newer ones."""


@dataclass(frozen=True)
class Scored:
    """What a reward said, or why it could not be computed."""

    task: int
    rewards: Sequence[Reward] | None = None
    error: str | None = None


class Scores(NamedTuple):
    """What became of results that were handed in."""

    num_tasks: int
    """Tasks that were waiting for them."""
    num_dropped: int
    """Groups that were dropped on them, whose places are free."""


@dataclass(frozen=True)
class Member:
    task: int
    index: int
    trajectory: Trajectory
    rewards: tuple[Reward, ...]
    reward: float
    """The sum of the rewards, each by its weight."""
    staleness: np.ndarray
    """Of each response token; -1 where it may not be trained: given, past the bound, or of an abandoned version."""

    @property
    def mask(self) -> np.ndarray:
        """True per response token that may be trained."""
        return self.staleness >= 0


@dataclass(frozen=True)
class BatchGroup:
    group: int
    ordinal: int
    source: str
    members: tuple[Member, ...]
    prompt: int | None = None
    """Of an answer that was claimed without its siblings, what it has in common with them; None for a whole group."""
    earlier: tuple[float, ...] = ()
    """Rewards of siblings that are not in the batch, as far as they were known when it was claimed."""


@dataclass(frozen=True)
class Batch:
    step: int
    from_version: int | None
    """None where the step was claimed ahead of its version."""
    groups: tuple[BatchGroup, ...]
    num_no_signal: int = 0
    """Groups that were dropped for want of a signal while it was waited for."""


class ComparedSegment(NamedTuple):
    """What an audit found of a segment: how many of its tokens' log-probs were compared with those of their own
    weights, and how many of these are off (`offbeat.control.trust`)."""

    task: int
    start: int
    num_tokens: int
    num_off: int


@dataclass(frozen=True)
class Surviving:
    """A training group that was begun and is in no batch yet."""

    first_step: int
    """Of the oldest version that a member was begun with."""
    num_tokens: tuple[int, ...]
    """Of each member, as far as they were handed in."""
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class Reconciled:
    """What a resume from a checkpoint changed."""

    step: int
    parent: int | None
    """The version to name as the parent of the weights that the trainer publishes next; None on a fresh run."""
    replays_batch: bool
    """Whether the batch of this step is already chosen: claiming it returns the same data as before."""
    abandoned_versions: tuple[int, ...] = ()
    undone_steps: tuple[int, ...] = ()
    num_reissued_groups: int = 0
    completed_step: int | None = None
    """A step that the checkpoint holds and whose commit was lost; now it counts as trained."""
    generation: int = field(default=0, compare=False)
    """Of the trainer, to be named with each of its calls; see `offbeat.ledger.trainers`."""


@dataclass(frozen=True)
class EvalGroup:
    group: int
    ordinal: int
    source: str
    state: GroupState
    reason: str | None
    rewards: tuple[float, ...]
    """Of the scored members."""
    num_failed: int
    size: int


@dataclass(frozen=True)
class EvalRound:
    """One evaluation, of the version of one step."""

    step: int
    is_abandoned: bool
    """A resume from an older checkpoint left its version behind."""
    groups: tuple[EvalGroup, ...]

    @property
    def is_complete(self) -> bool:
        return all(group.state in (GroupState.EVALUATED, GroupState.DROPPED) for group in self.groups)


@dataclass(frozen=True)
class TrajectoryCounts:
    """accepted = trained + waiting + dropped; evaluation is apart."""

    accepted: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: int = 0
    evaluated: int = 0


@dataclass(frozen=True)
class TokenCounts:
    """generated = trained + masked + waiting + partial + wasted + evaluated; only sampled tokens are counted."""

    generated: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    partial: int = 0
    """In beginnings that were handed back and wait to be carried on."""
    wasted: Mapping[str, int] = field(default_factory=dict)
    evaluated: int = 0


@dataclass(frozen=True)
class Counts:
    trajectories: TrajectoryCounts = TrajectoryCounts()
    tokens: TokenCounts = TokenCounts()
    groups: Mapping[str, int] = field(default_factory=dict)
    """Training groups by state."""
    dropped_groups: Mapping[str, int] = field(default_factory=dict)
    """Dropped training groups by reason."""
    failed_tasks: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    num_versions: int = 0
    max_staleness_trained: int = 0


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed that depends on `seed` and `path` alone, the same on every machine."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(blake3(text.encode()).digest(length=8), "little") >> 1
