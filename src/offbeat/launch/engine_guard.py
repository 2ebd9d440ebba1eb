"""Keeps an engine's server, with all the processes that it starts, from outliving its worker.

A SIGKILLed worker cannot clean up, and a server that nobody knows would hold a GPU for good. So the worker starts this
small process, which starts the server; the end of its input tells it that the worker is gone, or has had enough. The
server is then asked to end, and killed with its whole process group where it does not. Until all of that is over it
holds a lock, for which the next server of the same worker waits: two of them would not fit into one GPU. It is run as
a file with the standard library alone, so that it starts in a blink.

    guard LOCK FOLDER COMMAND ...   tells the server's process, then how it ended, a number in a line each; FOLDER is
                                    deleted in the end, unless it is empty
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

GRACE_S = 10.0
"""How long a server may take to end by itself."""
VANISH_WITHIN_S = 5.0
"""For what was killed to be gone: a GPU's memory takes a moment to be freed."""
LOOK_EVERY_S = 0.1
CANNOT_START = 127


def kill_group(group: int) -> None:
    """SIGKILL to a process group; one that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    lock, folder, *command = arguments
    try:
        return _guard(lock, command)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _guard(lock: str, command: list[str]) -> int:
    with open(lock, "ab") as held:
        if not _has_lock(held):
            return 0
        try:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            return _tell(0, CANNOT_START)
        _tell(server.pid)
        threading.Thread(target=_end_with_worker, args=(server,), daemon=True).start()
        status = server.wait()
        _clear(server.pid)
        return _tell(status)


def _has_lock(held: BinaryIO) -> bool:
    """Waits for the one before to be gone; False where the worker has gone meanwhile."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if select.select([0], [], [], LOOK_EVERY_S)[0]:  # nobody writes; only the end of the pipe is news
            return False


def _end_with_worker(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    server.terminate()
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        kill_group(server.pid)


def _clear(group: int) -> None:
    """Kills what the server left behind, such as the process that computes when the one that listens has crashed."""
    deadline_s = time.monotonic() + VANISH_WITHIN_S
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(LOOK_EVERY_S)


def _tell(*numbers: int) -> int:
    with contextlib.suppress(OSError):  # whoever wanted to know may be gone
        os.write(1, "".join(f"{number}\n" for number in numbers).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
