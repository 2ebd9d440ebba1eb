"""Groups and tasks of a simulated run: the numbers of tokens that a ledger would store, without the tokens."""

from __future__ import annotations

from enum import StrEnum

from offbeat.rules.groups import Candidate
from offbeat.rules.leases import OpenGroup


class TaskPhase(StrEnum):
    OPEN = "open"
    LEASED = "leased"
    ENDED = "ended"
    """Its answer is stored."""
    FAILED = "failed"


class SimulatedTask:
    """A task. `runs` holds the number of tokens of its answer by version, oldest first."""

    __slots__ = (
        "fence",
        "group",
        "id",
        "length",
        "member",
        "num_failures",
        "num_kept",
        "num_losses",
        "num_prompt_tokens",
        "num_tokens",
        "partial_of",
        "phase",
        "runs",
        "worker",
    )

    def __init__(self, number: int, group: SimulatedGroup, member: int, length: int, num_prompt_tokens: int):
        self.id, self.group, self.member = number, group, member
        self.length, self.num_prompt_tokens = length, num_prompt_tokens
        self.num_tokens = self.num_kept = 0
        """Tokens of the answer so far, and those of them that the coordinator has."""
        self.runs: list[tuple[int, int]] = []
        self.phase = TaskPhase.OPEN
        self.worker: str | None = None
        self.fence = 0
        self.partial_of: str | None = None
        """Worker that handed back the partial answer; None: there is none."""
        self.num_losses = self.num_failures = 0

    @property
    def num_left(self) -> int:
        return self.length - self.num_tokens

    @property
    def last_version(self) -> int | None:
        return self.runs[-1][0] if self.runs else None

    def grow(self, version: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        runs = self.runs
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + num_tokens)
        else:
            runs.append((version, num_tokens))

    def cut(self, num_tokens: int) -> int:
        """Forgets all tokens after the first `num_tokens`; returns how many it forgot."""
        lost = self.num_tokens - num_tokens
        self.num_tokens = num_tokens
        kept: list[tuple[int, int]] = []
        for version, count in self.runs:
            if num_tokens <= 0:
                break
            kept.append((version, min(count, num_tokens)))
            num_tokens -= count
        self.runs = kept
        return lost


class SimulatedGroup:
    __slots__ = (
        "candidate",
        "first_step",
        "id",
        "is_plain",
        "num_failed",
        "num_open",
        "num_scored",
        "ordinal",
        "phase",
        "ready_s",
        "record",
        "require_step",
        "require_version",
        "retry",
        "size",
        "spread",
        "tasks",
    )

    def __init__(self, number: int, ordinal: int, size: int, spread: float, retry: int = 0):
        self.id, self.ordinal, self.size, self.retry = number, ordinal, size, retry
        self.spread = spread
        """Highest reward minus lowest."""
        self.tasks: list[SimulatedTask] = []
        self.num_open = size
        self.num_scored = self.num_failed = 0
        self.phase = "open"
        self.first_step: int | None = None
        self.require_version: int | None = None
        self.require_step: int | None = None
        self.ready_s = 0.0
        self.is_plain = True
        """Whether none of its tasks was ever lost or handed back unfinished: then all workers see the same of it."""
        self.record: OpenGroup | None = None
        """What a lease call sees of the group while it is plain; None: it has changed since it was last asked for."""
        self.candidate: Candidate | None = None
        """What a claim sees of the group; None: it has changed since it was last asked for."""
