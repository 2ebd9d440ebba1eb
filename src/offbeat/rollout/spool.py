"""What a worker has done and nobody has acknowledged yet, on the worker's own disk.

One file per lease, written beside its place, flushed and renamed: it is whole or not there. A file carries the digest
of its content; a damaged one is set aside in a folder of its own and never sent. A worker that was killed finds here
what it still has to send.

The folder belongs to one worker of one run, because task numbers mean something within a run only, and to one process
at a time: the lock is the kernel's and goes with the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.trajectory import Trajectory

log = logging.getLogger(__name__)

MAGIC = b"offbeat spool 1\n"
SUFFIX = ".trajectory"
DAMAGED = "damaged"
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Unsent:
    """A trajectory, whole or partial, and the fence of the lease that led to it."""

    trajectory: Trajectory
    fence: int

    @property
    def key(self) -> tuple[int, int]:
        return self.trajectory.task, self.fence


class Spool:
    """See the module. Calls block on the disk."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"spool {folder}: cannot be written: {error.strerror}; choose another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise UserError(f"spool {folder}: in use by another worker; give each worker its own folder") from error
        for draft in self.folder.glob(f".*{SUFFIX}.*.draft"):  # a writer was killed half-way
            draft.unlink(missing_ok=True)

    def put(self, unsent: Unsent) -> None:
        """Returns once it is on disk."""
        content = msgspec.msgpack.encode((unsent.fence, unsent.trajectory.encode()))
        write_atomic(self._path(unsent.key), MAGIC + blake3(content).digest() + content)

    def remove(self, key: tuple[int, int]) -> None:
        self._path(key).unlink(missing_ok=True)

    def left(self) -> list[Unsent]:
        """What is still to be sent, in the order of tasks."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                found.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
                aside = self.folder / DAMAGED / path.name
                log.warning("spool: %s is damaged (%s) and will not be sent; it lies in %s", path, error, aside.parent)
                aside.parent.mkdir(exist_ok=True)
                path.replace(aside)
        return found

    def close(self) -> None:
        """Lets another process have the folder."""
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
        raise ValueError(f"its {len(data)} bytes are not what was written")
    fence, body = msgspec.msgpack.decode(content, type=tuple[int, bytes])
    return Unsent(Trajectory.decode(body), fence)
