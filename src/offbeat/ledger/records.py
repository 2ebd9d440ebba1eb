"""Records that go into the ledger and come out of it, and the states of groups, tasks and batches."""

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
    """Settings of a run that its ledger applies."""

    groups_per_step: int | None = None
    """Number of groups in a batch. It also limits how many groups may be begun (`rules.groups.may_begin`). None: there
    is no such limit, and no batch can be claimed."""
    max_staleness: int = 0
    """Largest staleness of a token that may be trained: steps from its version to the step that trains it."""
    max_kv_lag: int = 0
    """Largest number of versions by which a segment's KV cache may be older than the weights that sampled it."""
    min_group: int = 1
    """Smallest number of scored members with which a group can be trained."""
    max_no_signal: float = 0
    """Largest number of groups with equal rewards that may be dropped per step; 0: none is dropped."""
    max_attempts: int = 3
    """Number of failed attempts after which a task ends as failed."""
    episodes: frozenset[str] = frozenset()
    """Names of the sources whose tasks are episodes with tools or an environment."""
    in_rounds: bool = False
    """Whether training tasks are leased in rounds: only from the publication of a version until the batch of its step
    is claimed."""


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    """For evaluation: never claimed or trained on."""


class GroupState(StrEnum):
    """State of a group. A group ends once, as trained, evaluated or dropped. Only a resume from an older checkpoint can
    undo `trained`."""

    OPEN = "open"
    """Not all members have ended."""
    READY = "ready"
    """Every member has ended, and enough were scored to train on."""
    CLAIMED = "claimed"
    """In a batch that is not committed yet."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    """Evaluation group of which every member has ended, and at least one was scored."""
    DROPPED = "dropped"
    """Ended without training; `reason` says why."""


ALIVE = (GroupState.OPEN, GroupState.READY, GroupState.CLAIMED)


class Drop(StrEnum):
    """Why a group was dropped."""

    FAILED = "failed"
    """So many members failed that too few are left to train on; a training prompt is issued again once, with another
    seed."""
    STALE = "stale"
    """Every token is too stale to be trained; the prompt is issued again with the same seed."""
    ABANDONED = "abandoned"
    """A resume abandoned the version that the group requires, or the versions of all its tokens; a training prompt is
    issued again with the same seed."""
    NO_SIGNAL = "no_signal"
    """All its rewards are equal, so it teaches nothing; another prompt takes its place."""


class TaskState(StrEnum):
    """State of a task. A task fails if workers fail to produce its trajectory, or if its reward cannot be computed."""

    OPEN = "open"
    LEASED = "leased"
    ACCEPTED = "accepted"
    """Its trajectory is stored, but not its reward."""
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
    """The trajectory is stored, but its task had already ended, so its tokens count as wasted."""
    PARTIAL = "partial"
    """The trajectory is unfinished and was stored as its task's partial; the task may be leased again."""


class Submission(NamedTuple):
    """A trajectory, whole or partial, that a worker hands in under the fence of its lease."""

    trajectory: Trajectory
    worker: str
    fence: int


REWARD_FAILED = "reward"
"""Failure reason of a task whose reward could not be computed."""
WORKER_LOST = "lost"
"""Failure reason of an attempt whose worker vanished."""


class DrawCursor(NamedTuple):
    """Position of a group in the data: source, number of its prompt in the source, index among the prompt's groups."""

    source: str
    source_ordinal: int
    sibling: int


@dataclass(frozen=True)
class Cursor:
    """Position in the training data; re-issued groups do not move it."""

    next_ordinal: int
    drawn: Mapping[str, int]
    """For each source, the number of the next prompt to draw from it."""
    last: DrawCursor | None = None
    """Group drawn last; its prompt may still need further groups (siblings). None before the first draw."""


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """A group to admit. `ordinal` numbers training groups without gaps; each evaluation numbers its groups from 0."""

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
    """Index among the groups of the same prompt, which are drawn one after another."""
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
    """Position in the order of acceptance; pass it to `unscored` as `after` to get only later trajectories."""
    trajectory: Trajectory | None = None
    """The whole trajectory of an episode; None for one answer, of which nobody asks more than its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a turn of the episode."""

    @property
    def num_sampled(self) -> int:
        """Number of response tokens that the model wrote."""
        return len(self.response_tokens) if self.trajectory is None else int(self.trajectory.sampled_mask.sum())


@dataclass(frozen=True)
class Scored:
    """Rewards of a task, or the error that prevented them."""

    task: int
    rewards: Sequence[Reward] | None = None
    error: str | None = None


class Scores(NamedTuple):
    """Changes that a call of `score` made in the ledger."""

    num_tasks: int
    """Number of tasks whose reward or failure was stored. Results for tasks that waited for no reward are ignored."""
    num_dropped: int
    """Number of groups dropped; others may be admitted in their place."""


@dataclass(frozen=True)
class Member:
    task: int
    index: int
    trajectory: Trajectory
    rewards: tuple[Reward, ...]
    reward: float
    """Weighted sum of the rewards."""
    staleness: np.ndarray
    """Staleness of each response token; -1 if it may not be trained: given, too stale, or of an abandoned version."""
    is_proven: bool = True
    """Whether audits have found all workers that sampled the trajectory to be honest (`offbeat.rules.quarantine`)."""

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
    """Prompt id shared by answers that are claimed separately (`batch.gate` = "release" or "batch"); None for a group
    that is claimed as a whole."""
    earlier: tuple[float, ...] = ()
    """Rewards of other answers to the prompt that are not in this batch, but were scored before it was claimed; empty
    for a group that is claimed as a whole."""


@dataclass(frozen=True)
class Batch:
    step: int
    from_version: int | None
    """Version to train from; None if the step was claimed before its version was published."""
    groups: tuple[BatchGroup, ...]
    num_no_signal: int = 0
    """Number of groups dropped because of equal rewards while this batch was the next to be claimed."""


class ComparedSegment(NamedTuple):
    """Audit result of one segment: consecutive tokens that one worker sampled from one version. `num_tokens` is the
    number of tokens whose log-prob the trainer recomputed. For `num_off` of these tokens, the log-probs of trainer and
    worker differ too much."""

    task: int
    start: int
    num_tokens: int
    num_off: int


@dataclass(frozen=True)
class Reconciled:
    """Result of a resume from a checkpoint: the trainer's position, and the changes made to the ledger."""

    step: int
    parent: int | None
    """Parent of the version that the trainer publishes next; None on a fresh run."""
    replays_batch: bool
    """Whether a batch was already claimed for this step; the next claim then returns the same data as before."""
    abandoned_versions: tuple[int, ...] = ()
    undone_steps: tuple[int, ...] = ()
    """Steps after `step`, counted from 0, whose batches were taken back."""
    num_reissued_groups: int = 0
    completed_step: int | None = None
    """Step that was trained before the checkpoint was written, but whose commit did not reach the ledger. It now counts
    as trained. None: there is no such step."""
    generation: int = field(default=0, compare=False)
    """Number of this start of a trainer, which the trainer must name in each of its calls; see
    `offbeat.ledger.batches`."""


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
    """Evaluation of the version of one step."""

    step: int
    is_abandoned: bool
    """Whether a resume from an older checkpoint abandoned the version."""
    groups: tuple[EvalGroup, ...]

    @property
    def is_complete(self) -> bool:
        return all(group.state in (GroupState.EVALUATED, GroupState.DROPPED) for group in self.groups)


@dataclass(frozen=True)
class TrajectoryCounts:
    """Numbers of trajectories: accepted = trained + waiting + dropped. Evaluation is counted only in `evaluated`."""

    accepted: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: int = 0
    evaluated: int = 0


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of sampled tokens: generated = trained + masked + waiting + partial + wasted + evaluated. `masked` and
    `wasted` map reasons to numbers of tokens."""

    generated: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    waiting: int = 0
    partial: int = 0
    """Tokens in partials (unfinished trajectories) that wait to be continued or are being continued."""
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
    """Returns a 63-bit seed that depends only on `seed` and `path` and is the same on every machine."""
    text = ":".join(map(str, (seed, *path)))
    return int.from_bytes(blake3(text.encode()).digest(length=8), "little") >> 1


@dataclass(frozen=True)
class Arrival:
    """Identity of a trainer that starts, and whether it may undo the run; an argument of `Ledger.reconcile`."""

    name: str = "trainer"
    host: str = ""
    """Name of the trainer's machine, only shown to people."""
    home: str = ""
    """Identity of the trainer's checkpoint folder, which survives a restart."""
    from_scratch: bool = False
    """Whether the trainer may undo the whole run if it has no checkpoint."""
