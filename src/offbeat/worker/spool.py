"""The spool, which keeps trajectories on the worker's disk until they are acknowledged, and the outbox that sends them.

The spool keeps one file per lease, written by an atomic rename. A file carries the digest of its content; a damaged
file is moved to `damaged/` and never sent. After a kill, the worker finds its unsent trajectories in the spool. The
folder belongs to one worker of one run, because task numbers are unique only within a run, and to one process at a time
(file lock).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from offbeat.client.protocol import WorkerClient
from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, Refused, Unknown
from offbeat.testing.crash_points import crash_here
from offbeat.trajectory import Trajectory
from offbeat.waiting import Notifier

log = logging.getLogger(__name__)

MAGIC = b"offbeat spool 1\n"
SUFFIX = ".trajectory"
DAMAGED = "damaged"
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Unsent:
    """A trajectory, whole or partial, that is not acknowledged yet; `fence` is the fence of its task's lease."""

    trajectory: Trajectory
    fence: int

    @property
    def key(self) -> tuple[int, int]:
        return self.trajectory.task, self.fence


class Spool:
    """Folder of files with unsent trajectories. All methods block on the disk."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"spool folder {folder} cannot be written: {error.strerror}; choose another") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise UserError(f"spool folder {folder} is in use by another worker; give each worker its own") from error
        for draft in self.folder.glob(f".*{SUFFIX}.*.draft"):  # left by a writer that was killed
            draft.unlink(missing_ok=True)

    def put(self, unsent: Unsent) -> None:
        """Writes a trajectory and returns once it is on disk."""
        content = msgspec.msgpack.encode((unsent.fence, unsent.trajectory.encode()))
        write_atomic(self._path(unsent.key), MAGIC + blake3(content).digest() + content)

    def remove(self, key: tuple[int, int]) -> None:
        self._path(key).unlink(missing_ok=True)

    def left(self) -> list[Unsent]:
        """Returns the unsent trajectories in task order; moves damaged files to `damaged/`."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                found.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
                aside = self.folder / DAMAGED / path.name
                log.warning("spool: %s is damaged (%s) and will not be sent; moved to %s", path, error, aside.parent)
                aside.parent.mkdir(exist_ok=True)
                path.replace(aside)
        return found

    def close(self) -> None:
        """Releases the folder's lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _path(self, key: tuple[int, int]) -> Path:
        task, fence = key
        return self.folder / f"{task:012d}-{fence:06d}{SUFFIX}"


def _read(path: Path) -> Unsent:
    data = path.read_bytes()
    start = len(MAGIC) + DIGEST_BYTES
    content = data[start:]
    if not data.startswith(MAGIC) or data[len(MAGIC) : start] != blake3(content).digest():
        raise ValueError(f"its {len(data)} bytes do not match its digest")
    fence, body = msgspec.msgpack.decode(content, type=tuple[int, bytes])
    return Unsent(Trajectory.decode(body), fence)


REFUSALS = (Fenced, Refused, Conflict, Forbidden, Unknown)
"""Errors with which the coordinator refuses a submission for good: the same submission would be refused again."""
MAX_SENDS = 32
"""Largest number of concurrent submissions with a spool: enough to share the coordinator's commits, few enough not to
delay heartbeats. A worker without a spool runs in the coordinator's process, where no limit is needed."""


class Outbox:
    """Submits trajectories to the coordinator, each in its own asyncio task. The caller's task group passes errors on.

    With a spool, a trajectory is on disk before the first attempt to send it and until it is acknowledged or refused. A
    refused trajectory is logged and discarded; if its task is still leased to this worker, the task is reported as
    failed. Trajectories that came too late are discarded and counted; their number is logged once nothing is left to
    send. The client handles broken connections.
    """

    def __init__(self, worker: str, client: WorkerClient, spool: Spool | None, changes: Notifier):
        self.worker, self.client, self.spool, self._changes = worker, client, spool, changes
        self.unsent: dict[tuple[int, int], Unsent] = {}
        """Unsent trajectories by task and fence; the worker keeps renewing their leases."""
        self._num_late = 0
        self._sends = nullcontext() if spool is None else asyncio.Semaphore(MAX_SENDS)

    def __len__(self) -> int:
        return len(self.unsent)

    def post(self, unsent: Unsent, group: asyncio.TaskGroup) -> None:
        self.unsent[unsent.key] = unsent
        group.create_task(self._deliver(unsent))

    async def resend(self, group: asyncio.TaskGroup) -> None:
        """Sends what an earlier process left in the spool; returns when every trajectory is acknowledged or refused."""
        if self.spool is None:
            return
        left = await asyncio.to_thread(self.spool.left)
        if left:
            log.info("worker %s: sending %d trajectories left in the spool", self.worker, len(left))
        for unsent in left:
            self.unsent[unsent.key] = unsent
            group.create_task(self._send(unsent))
        await self._changes.wait_for(lambda: not any(unsent.key in self.unsent for unsent in left))

    async def send_all(self) -> None:
        """Sends all unsent trajectories once the worker's loops have ended; returns when each is acknowledged or
        refused."""
        async with asyncio.TaskGroup() as group:
            for unsent in self.unsent.values():
                group.create_task(self._send(unsent))

    async def _deliver(self, unsent: Unsent) -> None:
        if self.spool is not None:
            try:
                await asyncio.to_thread(self.spool.put, unsent)
            except OSError as error:  # still sent; lost only if the process is killed before
                log.warning(
                    "worker %s: the answer to task %d cannot be written to the spool, so a kill may lose it: %s",
                    self.worker,
                    unsent.trajectory.task,
                    error,
                )
        crash_here("spooled")
        await self._send(unsent)

    async def _send(self, unsent: Unsent) -> None:
        async with self._sends:
            try:
                await self.client.submit(unsent.trajectory, unsent.fence)
            except Fenced as error:
                log.info("worker %s: an answer came too late: %s", self.worker, error)
                self._num_late += 1
            except REFUSALS as error:
                log.warning("worker %s: a trajectory was refused and is discarded: %s", self.worker, error)
                if isinstance(error, Refused):  # still leased to this worker; needs another attempt
                    await self._fail(unsent, str(error))
        crash_here("acknowledged")
        if self.spool is not None:
            await asyncio.to_thread(self.spool.remove, unsent.key)
        del self.unsent[unsent.key]
        self._tell_late()
        self._changes.notify()

    def _tell_late(self) -> None:
        if self._num_late and not self.unsent:
            count = "1 answer" if self._num_late == 1 else f"{self._num_late} answers"
            why = "the coordinator discards an answer if its task was given to another worker or has ended"
            log.warning("worker %s: %s came too late: %s", self.worker, count, why)
            self._num_late = 0

    async def _fail(self, unsent: Unsent, reason: str) -> None:
        try:
            await self.client.fail(unsent.trajectory.task, unsent.fence, reason)
        except REFUSALS as error:
            log.info(
                "worker %s: the task of a refused trajectory could not be reported as failed: %s", self.worker, error
            )
