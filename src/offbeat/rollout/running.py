"""A task in the engine: its trajectory so far, what the engine is asked for it, and why it was aborted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec
import numpy as np

from offbeat.rollout.engine import EngineError, Finish, Generation, KvMode, Request
from offbeat.trajectory import End, Task, Trajectory


class Fate(StrEnum):
    """Why a running task was aborted."""

    LOST = "lost"
    """It is no longer this worker's: discard it."""
    HAND_BACK = "hand_back"
    """The coordinator wants its tokens so far; without one there is nothing to want, and it goes on."""
    RELOAD = "reload"
    """Weights change under an engine that cannot split: its tokens are handed back; without one it begins anew."""
    LEAVE = "leave"
    """The worker leaves: new tokens are handed back, and what has none is given up with the lease."""
    STOP = "stop"
    """Its round is over: new tokens are handed back, and what has none is given back as it came."""


@dataclass(eq=False)
class Running:
    """A task in the engine, and its trajectory so far."""

    task: Task
    trajectory: Trajectory
    fate: Fate | None = None
    is_waiting: bool = False
    """Leased, but not in the engine yet: its weights are on their way."""
    round: int | None = None
    """The one with which it ends at the latest; None: it goes on until it ends by itself."""
    is_untouched: bool = False
    """Stopped before it had a new token."""

    @property
    def key(self) -> tuple[int, int]:
        return self.task.id, self.task.fence

    @property
    def request_id(self) -> str:
        """Names fence and position too: a task may come back while its last request is still on its way out."""
        return f"{self.task.id}-{self.task.fence}-{self.trajectory.num_tokens}"

    @property
    def least_version(self) -> int:
        """The oldest version that may carry it on."""
        sampled = [segment.version for segment in self.trajectory.segments if segment.version is not None]
        return max(0, sampled[-1] - self.trajectory.max_version_drop) if sampled else 0


def begin(task: Task, round_number: int | None = None) -> Running:
    """What a task was handed out with is left as it is: others may hold the same prefix. What requires a version is an
    evaluation, and belongs to no round."""
    trajectory = task.new_trajectory() if task.prefix is None else replace(task.prefix)
    return Running(task, trajectory, round=round_number if task.require_version is None else None)


def request_for(running: Running, kv: KvMode = KvMode.SAME, kv_lag: int = 0) -> Request:
    """What the engine is asked: the prompt with the tokens so far, and the budget that is left."""
    task, trajectory = running.task, running.trajectory
    done = trajectory.num_tokens
    return Request(
        id=running.request_id,
        tokens=np.concatenate([task.prompt, trajectory.tokens]) if done else task.prompt,
        seed=task.seed,
        sampling=msgspec.structs.replace(task.sampling, max_new_tokens=task.sampling.max_new_tokens - done),
        position=done,
        kv=kv,
        kv_lag=kv_lag if kv is KvMode.STALE else 0,
    )


def append(trajectory: Trajectory, generation: Generation) -> bool:
    """Adds what was generated; tells whether the trajectory has ended with it."""
    if generation.finish is Finish.ABORT:
        for segment in generation.segments:
            trajectory.append(segment)
        return False
    if generation.finish is Finish.TURN or not generation.segments:
        raise EngineError(
            f"request {generation.id} ended by {generation.finish.value} with {len(generation.segments)} segments; "
            "allowed stop or length, after a token"
        )
    *first, last = generation.segments
    for segment in first:
        trajectory.append(segment)
    trajectory.append(last, End(generation.finish.value))
    return True
