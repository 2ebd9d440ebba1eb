"""Which worker holds which task, while it does: granted, kept by heartbeats, given back, lost.

The ledger remembers who holds what, `control.leases` says until when, and `control.pace` who holds tasks for too long
without an answer; this carries word between them. A task that a worker vanished with is a suspect until it is handed
in, see `control.assign`.

Guarantees: a task is lost to a worker only where the worker has vanished or begun anew; one that was merely lost from
sight, or hoarded, by a worker that is heard of, is given back and no task is to blame. Time in which this process
itself stood still, or waited for its disk, counts against nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from offbeat.control.leases import Held, Leases
from offbeat.control.pace import Pace
from offbeat.ledger.ledger import Ledger
from offbeat.serve.client import Heartbeat
from offbeat.serve.presence import Presence
from offbeat.serve.writer import Writer
from offbeat.trajectory import Origin, Task, Trajectory

MAX_SLEEP_S = 1.0
"""How often at least the leases are looked through."""

HELD_UP_SHARE = 0.25
"""Of the time of a lease: who wakes later than that was stopped or starved, and has heard nobody meanwhile. Workers
beat several times in the time of a lease, so a smaller delay cannot cost one its tasks."""

OTHERS_WITHIN_S = 60.0
"""Somebody who was heard of in this time could do what a hoarder holds: who waits for tasks asks several times in it,
and sends no heartbeats."""

MIN_SUSPECTS = 256
"""So many are remembered before the ledger is asked which of them still are."""


class Holding:
    """See the module; `on_free` hears that tasks can be begun by somebody else, `on_new_life` of a worker that was
    started again, and `on_hoarder` of one that is to be given nothing for a while, and why."""

    def __init__(
        self,
        ledger: Ledger,
        writer: Writer,
        presence: Presence,
        ttl_s: float,
        max_new_tokens: int,
        on_free: Callable[[], None],
        on_new_life: Callable[[str], None],
        on_hoarder: Callable[[str, str], Awaitable[None]],
    ):
        self._on_new_life, self._on_hoarder = on_new_life, on_hoarder
        self.pace = Pace(ttl_s, max_new_tokens, time.monotonic)
        self.ledger, self.leases = ledger, Leases(ttl_s, time.monotonic)
        self._share, self._presence, self._on_free = writer.call, presence, on_free
        self._suspects: set[int] = set()
        self._max_suspects = MIN_SUSPECTS

    async def start(self, *, keep_leases: bool) -> None:
        """Where leases are kept they have their whole time again; otherwise nobody can hold one."""
        if keep_leases:
            self.leases.grant(await self._share(self.ledger.leased))
        else:
            await self._share(self.ledger.release)
        self._suspects.update(await self._share(self.ledger.suspects))

    def granted(self, worker: str, tasks: Sequence[Task]) -> None:
        for task in tasks:
            held = Held(task.id, task.fence, worker)
            self.leases.grant([held])
            self.pace.granted(held, 0 if task.prefix is None else _num_sampled(task.prefix))

    def handed_in(self, worker: str, trajectory: Trajectory, fence: int, *, is_new: bool) -> None:
        """An answer was accepted, whole or partial; `is_new` unless it was there already."""
        self.leases.end([trajectory.task])
        if is_new:
            self.pace.handed_in(Held(trajectory.task, fence, worker), _num_sampled(trajectory))

    def failed(self, worker: str, task: int) -> None:
        self.leases.end([task])
        self.pace.begin_anew(worker)

    def cleared(self, task: int) -> bool:
        """A task was handed in whole; returns whether it had been a suspect, so that there is room for another."""
        was_suspect = task in self._suspects
        self._suspects.discard(task)
        return was_suspect

    async def heartbeat(self, worker: str, held: Sequence[tuple[int, int]], life: str) -> Heartbeat:
        """Gives leases their whole time again, and says which are lost."""
        if self._presence.begins_anew(worker, life):
            self.pace.forget(worker)
            self._on_new_life(worker)
            await self._lose_all_but(worker, held)
        self.leases.renew(Held(task, fence, worker) for task, fence in held)  # before the ledger, which may take long
        still = await self._share(self.ledger.still_held, worker, held)
        self.leases.grant(still)
        known = {lease.task for lease in still}
        return Heartbeat(lost=tuple(task for task, _ in held if task not in known))

    async def give_back(self, worker: str, leases: Sequence[tuple[int, int]]) -> bool:
        """Tasks that were not begun; returns whether any was really held."""
        held = [Held(task, fence, worker) for task, fence in leases]
        self.leases.end(lease.task for lease in held if self.leases.is_held(lease))
        return bool(await self._share(self.ledger.give_back, held, untouched=True))

    async def leave(self, worker: str) -> None:
        leases = [held for held in await self._share(self.ledger.leased) if held.worker == worker]
        await self._share(self.ledger.release, worker)
        self.leases.end(held.task for held in leases)

    async def expire(self) -> None:
        """Takes tasks back, for ever, from workers that have not been heard of for the time of a lease, and from those
        that are heard of and hand in nothing. One that was heard of and does not name a task has lost it from sight, or
        never got our answer."""
        while True:
            next_s = self.leases.next_deadline_s()
            left_s = MAX_SLEEP_S if next_s is None else min(max(next_s - time.monotonic(), 0.0), MAX_SLEEP_S)
            begins_s = time.monotonic()
            await asyncio.sleep(left_s)
            slept_s = time.monotonic() - begins_s
            if slept_s - left_s > HELD_UP_SHARE * self.leases.ttl_s:
                self.leases.renew_all()
                continue
            self.pace.pass_by(slept_s, self.leases.all())
            if self.pace.overdue():
                await self._take_from_hoarders()
            expired = self.leases.expired()
            if not expired:
                continue
            heard = set(self._presence.present(self.leases.ttl_s))
            num_free = await self._lose([held for held in expired if held.worker not in heard])
            num_free += await self._share(self.ledger.give_back, [held for held in expired if held.worker in heard])
            if num_free:
                self._on_free()

    async def _take_from_hoarders(self) -> None:
        """Frees what workers hold that are overdue; one with nobody beside it may go on, since it starves nobody."""
        leased = await self._share(self.ledger.leased)  # answers that waited for the disk have been taken in by then
        for worker, why in self.pace.overdue().items():
            if not self._presence.others(worker, max(self.leases.ttl_s, OTHERS_WITHIN_S)):
                continue
            self.pace.begin_anew(worker)
            await self._on_hoarder(worker, why)
            hoarded = [held for held in leased if held.worker == worker]
            self.leases.end(held.task for held in hoarded if self.leases.is_held(held))
            if await self._share(self.ledger.give_back, hoarded):
                self._on_free()

    async def _lose_all_but(self, worker: str, held: Sequence[tuple[int, int]]) -> None:
        """A worker died and was started again: what it does not name it had in its earlier life."""
        named, leased = set(held), await self._share(self.ledger.leased)
        gone = [lease for lease in leased if lease.worker == worker and (lease.task, lease.fence) not in named]
        self.leases.end(lease.task for lease in gone)
        if await self._lose(gone):
            self._on_free()

    async def _lose(self, leases: Sequence[Held]) -> int:
        num_lost = await self._share(self.ledger.lose, leases)
        self._suspects.update(held.task for held in leases)
        if len(self._suspects) >= self._max_suspects:  # those that failed for good are never handed in
            self._suspects &= set(await self._share(self.ledger.suspects))
            self._max_suspects = max(2 * len(self._suspects), MIN_SUSPECTS)
        return num_lost


def _num_sampled(trajectory: Trajectory) -> int:
    return sum(len(segment.tokens) for segment in trajectory.segments if segment.origin is Origin.SAMPLED)
