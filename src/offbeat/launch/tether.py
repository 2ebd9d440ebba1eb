"""Ties a child process to the life of its supervisor: when that ends, however it ends, so does the child.

The supervisor holds one end of a pipe and nobody writes to it. The kernel closes it with the supervisor, also when that
is killed; the child, which reads at the other end, is then asked to end, and made to if it does not.
"""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "OFFBEAT_TETHER"
GRACE_S = 10.0


def hold() -> bool:
    """Called by a child: from now on it ends with whoever started it, if that tied it to itself; tells whether."""
    descriptor = os.environ.pop(VARIABLE, None)
    if descriptor is None:
        return False
    os.set_inheritable(int(descriptor), False)  # our own children are not the supervisor's
    threading.Thread(target=_watch, args=(int(descriptor),), name="tether", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass  # nobody writes; only the end of the pipe is news
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
