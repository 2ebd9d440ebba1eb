"""Ends a child process when its supervisor ends, even if that was killed.

The supervisor holds one end of a pipe and writes nothing. The kernel closes it with the supervisor; the child, which
reads the other end, then gets SIGTERM, and ends at the latest after `GRACE_S`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "OFFBEAT_TETHER"
GRACE_S = 10.0


def watch_parent() -> bool:
    """Called by a child: starts the watch, if a supervisor asked for it; returns whether one did."""
    descriptor = os.environ.pop(VARIABLE, None)
    if descriptor is None:
        return False
    os.set_inheritable(int(descriptor), False)  # not for children of this process
    threading.Thread(target=_watch, args=(int(descriptor),), name="parent-watch", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass  # waits for the life of the supervisor, by design
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
