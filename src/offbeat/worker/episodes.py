"""Episodes of a worker: turns go to the environment, what comes back is appended as given tokens.

Guarantees:

- Tokens are only appended: nothing that was sampled or given is rendered or tokenised again.
- A turn that was cut by a limit is never acted on. An observation is appended whole, or the episode ends.
- The state of an environment follows from its seed and its turns. So an episode that comes back to this worker goes on
  with the environment that was parked for it; elsewhere, a deterministic one is replayed, and what it says must equal
  the tokens that are there. An episode whose environment cannot be had again begins anew, and its tokens are wasted.
- A wait for an environment ends at once when the task is aborted. The environment goes on meanwhile, and its answer
  waits for whoever resumes the episode here; so no call is made twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from offbeat.engines.protocol import EngineError, Finish, Generation
from offbeat.environments import wire
from offbeat.environments.formats import TurnFormat
from offbeat.environments.pool import EnvironmentFailed, EnvironmentLost, EnvironmentPool, EnvironmentSession
from offbeat.errors import OffbeatError
from offbeat.trajectory import (
    Claim,
    End,
    EpisodeRecord,
    EpisodeStart,
    Origin,
    Segment,
    Task,
    ToolCall,
    Trajectory,
    turns_of,
)

log = logging.getLogger(__name__)

PARK_S = 300.0
"""Longest time for which an environment waits for its episode to come back."""
GRACE_S = 0.25
"""Time that a step under way still gets when its task is aborted; most steps take less."""
MAX_BEGINNINGS = 4
"""Number of times that an episode is begun by one worker before its attempt fails, because its environment was lost."""


class EnvironmentGone(OffbeatError):
    """The environment of an episode cannot be had again, so the tokens that were handed back are of no use."""


class Diverged(OffbeatError):
    """A replayed environment says something else than the tokens of its episode."""


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of section `environment` that a worker applies."""

    max_turns: int
    max_turn_tokens: int
    timeout_s: float
    bad_calls: int


class Episode:
    """An episode that this worker carries on."""

    def __init__(self, task: Task, trajectory: Trajectory, form: TurnFormat, limits: EpisodeLimits):
        assert isinstance(task.episode, EpisodeStart)
        self.task, self.start, self.form, self.limits = task, task.episode, form, limits
        self.session: EnvironmentSession | None = None
        self.began_s = time.monotonic()
        self.num_beginnings = 0
        self.carry_on(trajectory)
        self._forget()

    def carry_on(self, trajectory: Trajectory) -> None:
        """Takes over the trajectory of a new lease."""
        self.trajectory = trajectory
        self.turns = turns_of(trajectory, self.form.stop_token_ids)

    def _forget(self) -> None:
        """Puts the cursor in front of the opening, for a fresh environment."""
        self.record = EpisodeRecord()
        self.num_given = 0
        """Position up to which the trajectory follows from what the environment has said and the turns before."""
        self.has_begun = False

    # The model's turns

    @property
    def awaits_environment(self) -> bool:
        """Whether the environment acts next."""
        return not self.has_begun or self.num_finished > self.record.num_turns

    @property
    def num_finished(self) -> int:
        """Number of turns that ended by a stop token."""
        if not self.turns:
            return 0
        is_whole = int(self.trajectory.tokens[self.turns[-1][1] - 1]) in self.form.stop_token_ids
        return len(self.turns) - (not is_whole)

    @property
    def turn_tokens_left(self) -> int:
        """Number of tokens that the current turn may still have."""
        first, last = self.turns[-1] if self.num_finished < len(self.turns) else (0, 0)
        room = self.trajectory.max_new_tokens - self.trajectory.num_tokens
        return min(self.limits.max_turn_tokens - (last - first), room)

    def append(self, generation: Generation) -> None:
        """Appends what the engine sampled. A turn that reached a limit ends the episode."""
        trajectory = self.trajectory
        if generation.finish is Finish.TURN or (generation.finish is not Finish.ABORT and not generation.segments):
            raise EngineError(
                f"the engine ended request {generation.id} with finish reason {generation.finish.value!r} and "
                f"{len(generation.segments)} segments of tokens; it must give at least one token, and finish with "
                "'stop' or 'length'"
            )
        before = self.turns.pop()[0] if self.num_finished < len(self.turns) else trajectory.num_tokens
        for segment in generation.segments:
            trajectory.append(segment)
        if trajectory.num_tokens > before:
            self.turns.append((before, trajectory.num_tokens))
        if generation.finish is Finish.LENGTH:
            self.finish(End.LENGTH)

    # The environment's

    async def answer(self, pool: EnvironmentPool, interruption: asyncio.Future[None]) -> None:
        """Lets the environment begin, or act on the first turn that it has not seen. Returns early if interrupted; the
        next call then waits for the same answer."""
        try:
            if not self.has_begun:
                await self._begin(pool, interruption)
            else:
                await self._act(interruption)
        except EnvironmentLost as lost:
            await self._again(pool, str(lost), alone=lost.is_suspect)
        except Diverged as diverged:
            log.warning("task %d: %s", self.task.id, diverged)
            self._begin_anew(str(diverged))

    async def _begin(self, pool: EnvironmentPool, interruption: asyncio.Future[None]) -> None:
        if self.session is None:
            self.num_beginnings += 1
            self.session = await pool.open(self.start.source)
            self._beginning = self.session.begin(self.start.problem, self.start.seed)
        began = await self._wait(self._beginning, interruption)
        if isinstance(began, wire.Began):
            self.has_begun = True
            self._give(self.form.opening(began.content), at=0)

    async def _act(self, interruption: asyncio.Future[None]) -> None:
        assert self.session is not None
        number = self.record.num_turns
        first, last = self.turns[number]
        turn = self.form.turn(number, self.trajectory.tokens[first:last].tolist())
        stepped = await self._wait(self.session.step(turn), interruption)
        if not isinstance(stepped, wire.Stepped):
            return
        record = self.record
        claims = record.claims
        if stepped.reward:
            claims += (Claim(stepped.reward, "turn", last - 1),)
        claims += tuple(Claim(value, name) for name, value in stepped.rewards.items())
        self.record = record = msgspec.structs.replace(
            record,
            num_turns=number + 1,
            claims=claims,
            calls=(*record.calls, *(ToolCall(number, *call) for call in stepped.calls)),
            num_bad=record.num_bad + 1 if stepped.error else 0,
            state=stepped.state,
        )
        if stepped.is_done:
            return self.finish(End.ENVIRONMENT if self.session.info.has_environment else End.STOP)
        if record.num_bad > self.limits.bad_calls:
            return self.finish(End.CALLS)
        if record.num_turns >= self.limits.max_turns:
            return self.finish(End.TURNS)
        ids = self.form.reply(turn, stepped.content, int(self.trajectory.tokens[last - 1]))
        if last + len(ids) >= self.trajectory.max_new_tokens:
            return self.finish(End.OVERFLOW)
        self._give(ids, at=last)

    def _give(self, ids: list[int], at: int) -> None:
        """Appends given tokens at position `at`; in a replay, compares them with the tokens there."""
        trajectory = self.trajectory
        if trajectory.num_tokens > at:
            following = next((first for first, _ in self.turns if first >= at), trajectory.num_tokens)
            if trajectory.tokens[at:following].tolist() != ids:
                raise Diverged(f"the environment of {self.start.source} said something else when it was replayed")
        elif ids:
            if at + len(ids) >= trajectory.max_new_tokens:  # an opening; later ones were checked
                raise EnvironmentFailed(
                    f"its opening has {len(ids)} tokens, which leave no room for an answer in rollout.max_new_tokens = "
                    f"{trajectory.max_new_tokens}"
                )
            trajectory.append(Segment(at, np.asarray(ids, np.int32), Origin.GIVEN))

    async def _wait(
        self, answer: asyncio.Future[wire.Began | wire.Stepped], interruption: asyncio.Future[None]
    ) -> wire.Began | wire.Stepped | None:
        """Waits for an answer of the environment; None: interrupted, or the episode's time is over."""
        start_s = time.monotonic()
        left_s = max(0.0, self.began_s + self.limits.timeout_s - start_s)
        if not answer.done():
            either: set[asyncio.Future[Any]] = {answer, interruption}
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and interruption.done():
            await asyncio.wait({answer}, timeout=min(GRACE_S, left_s))
        waited_ms = 1e3 * (time.monotonic() - start_s)
        self.record = msgspec.structs.replace(self.record, wait_ms=self.record.wait_ms + waited_ms)
        if answer.done():
            return answer.result()
        if not interruption.done():
            self.finish(End.TIME)
        return None

    def finish(self, end: End) -> None:
        """Ends the episode, with what was noted about it."""
        self.trajectory.finish(end)
        self.trajectory.episode = self.record
        self.close()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    # A lost environment

    async def _again(self, pool: EnvironmentPool, why: str, *, alone: bool) -> None:
        """Begins the environment again: a replay follows if it is deterministic, else the episode begins anew."""
        deterministic = pool.info[self.start.source].deterministic
        self._check_beginnings(why)
        if not deterministic:
            self._begin_anew(why)
        wait_ms = self.record.wait_ms
        self._forget()
        self.record = EpisodeRecord(wait_ms=wait_ms)
        self.num_beginnings += 1
        self.session = await pool.open(self.start.source, alone=alone)
        self._beginning = self.session.begin(self.start.problem, self.start.seed)

    def _begin_anew(self, why: str) -> None:
        """Drops the tokens of the episode; raises `EnvironmentGone` if the ledger has some of them."""
        self._check_beginnings(why)
        self.close()
        if self.task.prefix is not None:
            raise EnvironmentGone(why)
        self.session = None
        self.trajectory.segments = ()
        self.trajectory.__dict__.pop("tokens", None)
        self.turns = []
        self._forget()

    def _check_beginnings(self, why: str) -> None:
        if self.num_beginnings >= MAX_BEGINNINGS:
            raise EnvironmentFailed(f"it was lost {self.num_beginnings} times; the last time: {why}")


class Episodes:
    """The episodes of one worker, and the environments that are parked for those that were handed back."""

    def __init__(
        self, pool: EnvironmentPool, forms: Mapping[str, TurnFormat], limits: EpisodeLimits, at_once: int | None = None
    ):
        """`at_once`: number of episodes that the worker carries on at the same time; None: twice the engine's slots."""
        self.pool, self.forms, self.limits, self._at_once = pool, forms, limits, at_once
        self._parked: dict[int, tuple[Episode, float]] = {}

    def at_once(self, num_slots: int) -> int:
        return self._at_once or 2 * num_slots

    def enter(self, task: Task, trajectory: Trajectory) -> Episode:
        """Returns the episode of a leased task: one that was parked here, or one at its beginning. Raises
        `EnvironmentGone` if it has tokens whose environment is neither here nor can be replayed."""
        self._expire()
        episode = self._parked.pop(task.id, (None, 0.0))[0]
        if episode is not None and _is_same(episode.trajectory, task.prefix):
            episode.task = task
            episode.carry_on(trajectory)
            return episode
        if episode is not None:
            episode.close()
        assert isinstance(task.episode, EpisodeStart)
        if task.prefix is not None and not self.pool.info[task.episode.source].deterministic:
            raise EnvironmentGone("the episode comes from elsewhere, and its environment is not deterministic")
        return Episode(task, trajectory, self.forms[task.episode.source], self.limits)

    def park(self, episode: Episode) -> Trajectory:
        """Keeps the environment of an episode that is handed back; returns the partial to hand back."""
        self._expire()
        if (before := self._parked.pop(episode.task.id, None)) is not None:
            before[0].close()
        self._parked[episode.task.id] = episode, time.monotonic() + PARK_S
        return replace(episode.trajectory, episode=EpisodeRecord())

    def _expire(self) -> None:
        now_s = time.monotonic()
        while self._parked and next(iter(self._parked.values()))[1] < now_s:
            self._parked.pop(next(iter(self._parked)))[0].close()


def _is_same(parked: Trajectory, prefix: Trajectory | None) -> bool:
    return prefix is not None and np.array_equal(parked.tokens, prefix.tokens)
