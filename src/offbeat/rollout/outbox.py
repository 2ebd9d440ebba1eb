"""Hands in what a worker has done, a few trajectories at a time.

With a spool, a trajectory is on the worker's disk before the first attempt to send it, and leaves the disk once it is
acknowledged or finally refused. A refusal concerns that trajectory alone: it is told and discarded, never tried again;
where the task is still ours it is given back. Broken connections are the client's affair.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext

from offbeat.crash import crash_here
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.rollout.spool import Spool, Unsent
from offbeat.rollout.waiting import Changes
from offbeat.serve.client import WorkerClient

log = logging.getLogger(__name__)

REFUSALS = (Fenced, Refused, Conflict, Forbidden, Unknown)
"""What the coordinator will answer again and again to the same submission."""
MAX_SENDS = 32
"""Over a line: enough to fill the coordinator's commits, few enough not to crowd out heartbeats. Without one there is
no limit: what is handed in at one moment shares one commit."""


class Outbox:
    """See the module; sending happens in tasks of the group that each call names, so that no error is lost."""

    def __init__(self, worker: str, client: WorkerClient, spool: Spool | None, changes: Changes):
        self.worker, self.client, self.spool, self._changes = worker, client, spool, changes
        self.unsent: dict[tuple[int, int], Unsent] = {}
        """By task and fence: these leases are still to be renewed."""
        self._sends = nullcontext() if spool is None else asyncio.Semaphore(MAX_SENDS)

    def __len__(self) -> int:
        return len(self.unsent)

    def post(self, unsent: Unsent, group: asyncio.TaskGroup) -> None:
        self.unsent[unsent.key] = unsent
        group.create_task(self._deliver(unsent))

    async def resend(self, group: asyncio.TaskGroup) -> None:
        """Sends what an earlier life of this worker left behind; returns once all of it is answered."""
        if self.spool is None:
            return
        left = await asyncio.to_thread(self.spool.left)
        if left:
            log.info("worker %s: sends %d trajectories that it had not sent when it ended", self.worker, len(left))
        for unsent in left:
            self.unsent[unsent.key] = unsent
            group.create_task(self._send(unsent))
        await self._changes.until(lambda: not any(unsent.key in self.unsent for unsent in left))

    async def send_all(self) -> None:
        """Sends what no loop sends any more, because the worker's life has ended; returns once it is answered."""
        async with asyncio.TaskGroup() as group:
            for unsent in self.unsent.values():
                group.create_task(self._send(unsent))

    async def _deliver(self, unsent: Unsent) -> None:
        if self.spool is not None:
            try:
                await asyncio.to_thread(self.spool.put, unsent)
            except OSError as error:  # it can still be sent, and only a kill before that would lose it
                log.warning("worker %s: task %d cannot be spooled: %s", self.worker, unsent.trajectory.task, error)
        crash_here("spooled")
        await self._send(unsent)

    async def _send(self, unsent: Unsent) -> None:
        async with self._sends:
            try:
                await self.client.submit(unsent.trajectory, unsent.fence)
            except REFUSALS as error:
                log.warning("worker %s: discarded what was refused: %s", self.worker, error)
                if isinstance(error, Refused):  # the task is still ours, and wants another try
                    await self._give_back(unsent, str(error))
        crash_here("acknowledged")
        if self.spool is not None:
            await asyncio.to_thread(self.spool.remove, unsent.key)
        del self.unsent[unsent.key]
        self._changes.tell()

    async def _give_back(self, unsent: Unsent, reason: str) -> None:
        try:
            await self.client.fail(unsent.trajectory.task, unsent.fence, reason)
        except REFUSALS as error:
            log.info("worker %s: not given back: %s", self.worker, error)
