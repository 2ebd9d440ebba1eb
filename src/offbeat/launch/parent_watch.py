"""Ends a child process when its supervisor ends, even if the supervisor was killed.

The supervisor holds the write end of a pipe and writes nothing. When it ends, the kernel closes the pipe. The child,
which reads from the pipe, then sends itself SIGTERM and exits after at most `GRACE_S`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "OFFBEAT_TETHER"
GRACE_S = 10.0


def watch_parent() -> bool:
    """Makes this process end when its supervisor ends, and returns True. Does nothing and returns False if this process
    was not started by a supervisor."""
    descriptor = os.environ.pop(VARIABLE, None)
    if descriptor is None:
        return False
    os.set_inheritable(int(descriptor), False)  # not inherited by children of this process
    threading.Thread(target=_watch, args=(int(descriptor),), name="parent-watch", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass  # blocks until the supervisor ends, by design
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
