"""Guard process: ends an engine's server, with all processes that the server started, when the worker ends.

A SIGKILLed worker cannot clean up, and an orphaned server would hold a GPU forever. The guard's standard input is a
pipe from the worker, so it closes when the worker ends or stops its server. Then the guard sends SIGTERM to the server,
and after `GRACE_S` seconds SIGKILL to the server's process group. The guard holds a lock until all these processes are
gone. The worker's next server waits for the lock, because two servers would not fit into one GPU. The guard runs as a
file and imports only the standard library, to start quickly.

    guard LOCK FOLDER COMMAND ...   runs COMMAND; prints the server's process id and then its exit status, one per
                                    line; finally deletes FOLDER, unless it is ""
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
"""Seconds that a server has to end after SIGTERM."""
VANISH_WITHIN_S = 5.0
"""Seconds that killed processes have to disappear: it takes a moment to free a GPU's memory."""
POLL_EVERY_S = 0.1
CANNOT_START = 127


def kill_group(group: int) -> None:
    """Sends SIGKILL to a process group, which may already be gone."""
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
            return _report(0, CANNOT_START)
        _report(server.pid)
        threading.Thread(target=_end_with_worker, args=(server,), daemon=True).start()
        status = server.wait()
        _clear(server.pid)
        return _report(status)


def _has_lock(held: BinaryIO) -> bool:
    """Waits for the lock, which the guard of the worker's previous server holds until that server is gone. Returns
    False if the worker ends, or stops this server, first."""
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if select.select([0], [], [], POLL_EVERY_S)[0]:  # readable: the pipe was closed, since nothing is ever written
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
    """Kills processes of `group` that an ended server left behind, such as its workers after its front end crashed."""
    deadline_s = time.monotonic() + VANISH_WITHIN_S
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(POLL_EVERY_S)


def _report(*numbers: int) -> int:
    with contextlib.suppress(OSError):  # the worker may be gone
        os.write(1, "".join(f"{number}\n" for number in numbers).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
