"""Manages leases of tasks: grants them, renews them at heartbeats, and takes them back.

The ledger stores leases, `rules.leases` tracks their deadlines, and `rules.quarantine` finds hoarders (workers that
hold tasks too long without submitting anything). A task whose worker vanished is a suspect (it may have killed the
worker) until its trajectory is complete.

Guarantees: a lease counts as lost only if its worker vanished or restarted. If a live worker hoards a task, or does not
name it in its heartbeats, the task may be leased again, and no attempt counts as failed. Time in which this process
itself was stopped, or waited for its disk, does not count against workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from offbeat.client.protocol import Heartbeat
from offbeat.coordinator.writer import Writer
from offbeat.ledger.ledger import Ledger
from offbeat.rules.leases import Lease, Leases, lost_and_kept
from offbeat.rules.presence import Presence
from offbeat.rules.quarantine import HandInPace
from offbeat.trajectory import Origin, Task, Trajectory

MAX_SLEEP_S = 1.0
"""Longest pause between two checks of the leases."""

HELD_UP_SHARE = 0.25
"""If this process wakes up late by more than this share of the lease time, it renews all leases: it was stopped or
starved, and could not receive heartbeats. A smaller delay costs no lease, because heartbeats come several times per
lease time."""

OTHERS_WITHIN_S = 60.0
"""A worker that made a call within this time counts as able to do a hoarder's tasks. An idle worker sends no
heartbeats, but asks for tasks several times within this time."""

MIN_SUSPECTS = 256
"""Smallest number of remembered suspects (tasks whose worker vanished) at which those that have ended are forgotten."""


class LeaseManager:
    """Grants, renews and takes back leases.

    Calls `on_free` when tasks become free, `on_restart` with the name of a restarted worker, and `on_hoarder` with the
    name of a worker to set aside and the reason.
    """

    def __init__(
        self,
        ledger: Ledger,
        writer: Writer,
        presence: Presence,
        ttl_s: float,
        max_new_tokens: int,
        on_free: Callable[[], None],
        on_restart: Callable[[str], None],
        on_hoarder: Callable[[str, str], Awaitable[None]],
    ):
        self._on_restart, self._on_hoarder = on_restart, on_hoarder
        self.pace = HandInPace(ttl_s, max_new_tokens, time.monotonic)
        self.ledger, self.leases = ledger, Leases(ttl_s, time.monotonic)
        self._share, self._presence, self._on_free = writer.call, presence, on_free
        self._suspects: set[int] = set()
        self._max_suspects = MIN_SUSPECTS

    async def start(self, *, keep_leases: bool) -> None:
        """Renews all stored leases if `keep_leases`; otherwise releases them, because their workers have ended."""
        if keep_leases:
            self.leases.grant(await self._share(self.ledger.leased))
        else:
            await self._share(self.ledger.release)
        self._suspects.update(await self._share(self.ledger.suspects))

    def granted(self, worker: str, tasks: Sequence[Task]) -> None:
        for task in tasks:
            held = Lease(task.id, task.fence, worker)
            self.leases.grant([held])
            self.pace.granted(held, 0 if task.prefix is None else _num_sampled(task.prefix))

    def handed_in(self, worker: str, trajectory: Trajectory, fence: int, *, is_new: bool) -> None:
        """Ends the lease `fence` of a task, because the worker's trajectory, whole or partial, was accepted. `is_new`
        is False if an earlier call had already stored the trajectory."""
        self.leases.end([trajectory.task])
        if is_new:
            self.pace.handed_in(Lease(trajectory.task, fence, worker), _num_sampled(trajectory))

    def failed(self, worker: str, task: int) -> None:
        self.leases.end([task])
        self.pace.reset_quiet_time(worker)

    def cleared(self, task: int) -> bool:
        """Removes a completed task from the suspects (tasks whose worker vanished); returns whether it was one."""
        was_suspect = task in self._suspects
        self._suspects.discard(task)
        return was_suspect

    async def heartbeat(self, worker: str, held: Sequence[tuple[int, int]], life: str) -> Heartbeat:
        """Renews the worker's leases `held`, pairs of task and fence (lease number). A new `life` means that the worker
        restarted: its other leases then count as lost. The answer names the tasks in `held` that the worker no longer
        holds."""
        if self._presence.has_restarted(worker, life):
            self.pace.forget(worker)
            self._on_restart(worker)
            await self._lose_all_but(worker, held)
        self.leases.renew(Lease(task, fence, worker) for task, fence in held)  # before the ledger, which may be slow
        still = await self._share(self.ledger.still_held, worker, held)
        self.leases.grant(still)
        known = {lease.task for lease in still}
        return Heartbeat(lost=tuple(task for task, _ in held if task not in known))

    async def give_back(self, worker: str, leases: Sequence[tuple[int, int]]) -> bool:
        """Frees tasks for which the worker has sampled no token. `leases` are pairs of task and fence (lease number).
        Returns whether the worker still held any of them."""
        held = [Lease(task, fence, worker) for task, fence in leases]
        self.leases.end(lease.task for lease in held if self.leases.is_held(lease))
        return bool(await self._share(self.ledger.give_back, held, untouched=True))

    async def leave(self, worker: str) -> None:
        leases = [held for held in await self._share(self.ledger.leased) if held.worker == worker]
        await self._share(self.ledger.release, worker)
        self.leases.end(held.task for held in leases)

    async def expire(self) -> None:
        """Takes tasks back, in an endless loop: those of workers that made no call for the lease time, those that a
        live worker no longer names in its heartbeats, and those of hoarders."""
        while True:
            next_s = self.leases.next_deadline_s()
            left_s = MAX_SLEEP_S if next_s is None else min(max(next_s - time.monotonic(), 0.0), MAX_SLEEP_S)
            begins_s = time.monotonic()
            await asyncio.sleep(left_s)
            slept_s = time.monotonic() - begins_s
            if slept_s - left_s > HELD_UP_SHARE * self.leases.ttl_s:
                self.leases.renew_all()
                continue
            self.pace.add_quiet_time(slept_s, self.leases.all())
            if self.pace.overdue():
                await self._take_from_hoarders()
            expired = self.leases.expired()
            if not expired:
                continue
            lost, kept = lost_and_kept(expired, set(self._presence.present(self.leases.ttl_s)))
            num_free = await self._lose(lost) + await self._share(self.ledger.give_back, kept)
            if num_free:
                self._on_free()

    async def _take_from_hoarders(self) -> None:
        """Sets aside hoarders (workers that hold tasks too long) and frees their tasks, if others can do the tasks."""
        leased = await self._share(self.ledger.leased)  # by now, answers that waited for the disk are stored
        for worker, why in self.pace.overdue().items():
            if not self._presence.others(worker, max(self.leases.ttl_s, OTHERS_WITHIN_S)):
                continue
            self.pace.reset_quiet_time(worker)
            await self._on_hoarder(worker, why)
            hoarded = [held for held in leased if held.worker == worker]
            self.leases.end(held.task for held in hoarded if self.leases.is_held(held))
            if await self._share(self.ledger.give_back, hoarded):
                self._on_free()

    async def _lose_all_but(self, worker: str, held: Sequence[tuple[int, int]]) -> None:
        """Counts a restarted worker's leases as lost, except those in `held`, which its new process holds."""
        named, leased = set(held), await self._share(self.ledger.leased)
        gone = [lease for lease in leased if lease.worker == worker and (lease.task, lease.fence) not in named]
        self.leases.end(lease.task for lease in gone)
        if await self._lose(gone):
            self._on_free()

    async def _lose(self, leases: Sequence[Lease]) -> int:
        num_lost = await self._share(self.ledger.lose, leases)
        self._suspects.update(held.task for held in leases)
        if len(self._suspects) >= self._max_suspects:  # tasks that failed for good are never handed in
            self._suspects &= set(await self._share(self.ledger.suspects))
            self._max_suspects = max(2 * len(self._suspects), MIN_SUSPECTS)
        return num_lost


def _num_sampled(trajectory: Trajectory) -> int:
    return sum(len(segment.tokens) for segment in trajectory.segments if segment.origin is Origin.SAMPLED)
