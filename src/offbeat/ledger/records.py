"""Records that go into the ledger and come out of it, and lifecycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from offbeat.trajectory import End, Reward, Sampling, Trajectory


@dataclass(frozen=True)
class LedgerTerms:
    """Rules of a run that its ledger applies, given once when it is opened."""

    groups_per_step: int | None = None
    """Groups of a batch, which also paces leases; None: no pacing, and no batch can be claimed."""
    max_staleness: int = 0
    """Largest staleness of a token that may be trained: the bound."""
    max_kv_lag: int = 0
    """Versions that a segment's keys and values may be older than its weights."""
    min_group: int = 1
    """Scored members that a group needs."""
    max_no_signal: float = 0
    """Groups with equal rewards that may be dropped for a step."""
    max_attempts: int = 3
    """Failed attempts that end a task."""
    in_rounds: bool = False
    """Whether training tasks are leased only between the publication of a version and the claim of its step."""


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    """Never claimed, never trained on."""


class GroupState(StrEnum):
    """Life of a group. A group ends once, as trained, evaluated or dropped; a resume from an older checkpoint undoes
    later batches, and with them `trained`."""

    OPEN = "open"
    """Members are under way."""
    READY = "ready"
    """Every member ended, and enough were scored to train on."""
    CLAIMED = "claimed"
    """In a batch that is not committed."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    """End of an evaluation group."""
    DROPPED = "dropped"
    """Ended without training; `reason` says why."""


ALIVE = (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)


class Drop(StrEnum):
    """Why a group was dropped."""

    FAILED = "failed"
    """Too few members remained; re-issued once, with another seed."""
    STALE = "stale"
    """No token is left that may be trained; re-issued."""
    ABANDONED = "abandoned"
    """A resume abandoned its version; re-issued with the same seed, so that equal weights give equal tokens."""
    NO_SIGNAL = "no_signal"
    """All its rewards are equal; another prompt takes its place."""


class TaskState(StrEnum):
    """Life of a task. `failed` without a trajectory was the worker's failure; with one, the reward's."""

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
    """Undone by a resume from an older checkpoint; the row stays as history."""


class Outcome(StrEnum):
    """Outcome of a submission."""

    STORED = "stored"
    REPEATED = "repeated"
    """The same trajectory was stored already; nothing changed."""
    LATE = "late"
    """Its task had ended without it; it is kept, and its tokens count as wasted."""
    PARTIAL = "partial"
    """Kept as a partial of its task, which is open again."""


class Submission(NamedTuple):
    """A trajectory, whole or partial, that a worker hands in under the fence of its lease."""

    trajectory: Trajectory
    worker: str
    fence: int


REWARD_FAILED = "reward"
"""Reason of a task whose reward could not be computed."""
WORKER_LOST = "lost"
"""Reason of a task whose workers vanished `max_attempts` times."""


class DrawCursor(NamedTuple):
    """Source of a group's prompt, and index of the group among those of the prompt."""

    source: str
    source_ordinal: int
    sibling: int


@dataclass(frozen=True)
class Cursor:
    """Progress through the data; re-issued groups do not count."""

    next_ordinal: int
    drawn: Mapping[str, int]
    """One past the highest ordinal drawn, by source."""
    last: DrawCursor | None = None
    """Group drawn last, whose prompt may need more groups."""


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """A prompt to admit. Training groups are numbered by `ordinal` without a gap; evaluation groups within the round of
    the step of `require_version`."""

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
    """Index among the groups of its prompt: 0, unless the previous group has the same prompt."""
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
    """Order of acceptance; give the last one seen as `after` to get newer ones only."""


@dataclass(frozen=True)
class Scored:
    """Rewards of a task, or the error for which there are none."""

    task: int
    rewards: Sequence[Reward] | None = None
    error: str | None = None


class Scores(NamedTuple):
    """Effect of storing results."""

    num_tasks: int
    """Tasks that waited for them."""
    num_dropped: int
    """Groups dropped, whose places are free."""


@dataclass(frozen=True)
class Member:
    task: int
    index: int
    trajectory: Trajectory
    rewards: tuple[Reward, ...]
    reward: float
    """Weighted sum of the rewards."""
    staleness: np.ndarray
    """By response token; -1 if it may not be trained: given, past the bound, or of an abandoned version."""
    is_proven: bool = True
    """Whether audits have found all who sampled it honest so far (`offbeat.rules.quarantine`)."""

    @property
    def mask(self) -> np.ndarray:
        """True for each response token that may be trained."""
        return self.staleness >= 0


@dataclass(frozen=True)
class BatchGroup:
    group: int
    ordinal: int
    source: str
    members: tuple[Member, ...]
    prompt: int | None = None
    """Prompt id shared by answers that are claimed separately (gate = release or batch); None for a whole group."""
    earlier: tuple[float, ...] = ()
    """Rewards of siblings outside the batch that were stored before its claim."""


@dataclass(frozen=True)
class Batch:
    step: int
    from_version: int | None
    """None if the step was claimed ahead of its version."""
    groups: tuple[BatchGroup, ...]
    num_no_signal: int = 0
    """Groups without a signal that were dropped before it was claimed."""


class ComparedSegment(NamedTuple):
    """Audit of a segment: tokens whose log-probs were compared with those of their own weights, and how many are off
    (`offbeat.rules.quarantine`)."""

    task: int
    start: int
    num_tokens: int
    num_off: int


@dataclass(frozen=True)
class Surviving:
    """A training group that was begun and is in no batch yet."""

    first_step: int
    """Step of the oldest version that a member was begun with."""
    num_tokens: tuple[int, ...]
    """Tokens handed in so far, by member."""
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class Reconciled:
    """Changes made by a resume from a checkpoint."""

    step: int
    parent: int | None
    """Parent of the version that the trainer publishes next; None on a fresh run."""
    replays_batch: bool
    """Whether the batch of this step is already chosen: a claim returns the same data as before."""
    abandoned_versions: tuple[int, ...] = ()
    undone_steps: tuple[int, ...] = ()
    num_reissued_groups: int = 0
    completed_step: int | None = None
    """Step whose commit was lost although the checkpoint has it; now it counts as trained."""
    generation: int = field(default=0, compare=False)
    """Generation of the trainer, which it names in each of its calls; see `offbeat.ledger.batches`."""


@dataclass(frozen=True)
class EvalGroup:
    group: int
    ordinal: int
    source: str
    state: GroupState
    reason: str | None
    rewards: tuple[float, ...]
    """Rewards of the scored members."""
    num_failed: int
    size: int


@dataclass(frozen=True)
class EvalRound:
    """One evaluation, of the version of one step."""

    step: int
    is_abandoned: bool
    """Whether a resume from an older checkpoint abandoned its version."""
    groups: tuple[EvalGroup, ...]

    @property
    def is_complete(self) -> bool:
        return all(group.state in (GroupState.EVALUATED, GroupState.DROPPED) for group in self.groups)


@dataclass(frozen=True)
class TrajectoryCounts:
    """accepted = trained + waiting + dropped; evaluation is counted separately."""

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
    """Tokens in partials that wait to be continued."""
    wasted: Mapping[str, int] = field(default_factory=dict)
    evaluated: int = 0


@dataclass(frozen=True)
class Counts:
    trajectories: TrajectoryCounts = TrajectoryCounts()
    tokens: TokenCounts = TokenCounts()
    groups: Mapping[str, int] = field(default_factory=dict)
    """Number of training groups by state."""
    dropped_groups: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped training groups by reason."""
    failed_tasks: Mapping[str, int] = field(default_factory=dict)
    """Number of failed tasks by reason."""
    num_versions: int = 0
    max_staleness_trained: int = 0


def derive_seed(seed: int, *path: object) -> int:
    """A 63-bit seed that depends on `seed` and `path` alone, the same on every machine."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(blake3(text.encode()).digest(length=8), "little") >> 1


@dataclass(frozen=True)
class Arrival:
    """Introduction of a trainer that begins."""

    name: str = "trainer"
    host: str = ""
    """Its machine, for people."""
    home: str = ""
    """Identity of the folder of its checkpoints, which survives a restart."""
    from_scratch: bool = False
    """Whether it may undo a whole run of which it has no checkpoint."""
