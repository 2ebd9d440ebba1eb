"""One process at a time may work in a run's folder.

The lock is the kernel's (flock), so it goes with its process, however that ends; forked children do not keep it. The
file says who holds it, for people and for the error of whoever comes second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from offbeat.errors import UserError

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """Held from construction until `release`."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be written: {error.strerror}; choose another run.dir") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(f"{path.parent}: is in use by {_holder(path)}; stop it or wait for it") from error
            raise UserError(
                f"{path.parent}: its file system cannot lock files ({error.strerror}); choose another run.dir"
            ) from error
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, without a name on it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock and has not said its name yet
        return "another process"


def _release_in_child() -> None:
    """A forked child shares its parent's lock; closing the child's copy leaves the parent's in force."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
