"""Crash points: places where a process can be made to die, for tests that nothing is lost or doubled there.

`OFFBEAT_CRASH_AT` names points, separated by commas; `name:3` is the third time that a process passes the point. The
process gets SIGKILL, so nothing is flushed. With `OFFBEAT_CRASH_ONCE`, a folder, each point kills one process only and
leaves a file of its name there, so that a run which restarts its processes gets past it. Without `OFFBEAT_CRASH_AT` a
call does nothing.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

AT = "OFFBEAT_CRASH_AT"
ONCE = "OFFBEAT_CRASH_ONCE"

POINTS: dict[str, tuple[str, ...]] = {
    "coordinator": (
        "submission-stored",  # on disk, not acknowledged
        "claim-chosen",  # the batch is chosen, its transaction not committed
        "claim-stored",  # committed, not answered
        "step-committed",  # trained, the version not announced
        "evaluation-admitted",  # the work not announced
    ),
    "trainer": (
        "reconciled",  # with the ledger, before the weights are published
        "batch-claimed",
        "version-written",  # on disk, not committed
        "version-committed",  # the step's row not reported
        "checkpoint-saved",  # not reported
    ),
    "worker": (
        "version-fetched",  # not loaded
        "task-leased",  # not begun
        "generated",  # in memory only
        "spooled",  # not sent
        "acknowledged",  # still in the spool
    ),
    "receiver": (
        "manifest-kept",  # verified, none of its pieces here
        "piece-arrived",  # whole, not renamed
        "pieces-fetched",  # all of them, the version not built
        "version-built",  # not reported
        "half-forgotten",  # old versions deleted, their pieces not
    ),
}
"""All points, by role."""

_wanted = os.environ.get(AT)
"""Read once: some points are passed for every trajectory."""
_passed: Counter[str] = Counter()


def crash_here(point: str) -> None:
    if _wanted is None:
        return
    _passed[point] += 1
    for entry in _wanted.split(","):
        name, _, time = entry.partition(":")
        if name == point and _passed[point] == int(time or 1) and _is_first(point):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_first(point: str) -> bool:
    """Whether no process has died at this point before; True without `OFFBEAT_CRASH_ONCE`."""
    folder = os.environ.get(ONCE)
    if folder is None:
        return True
    try:
        os.close(os.open(Path(folder) / point, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
