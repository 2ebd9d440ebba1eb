"""Crash points: places where tests can kill a process, to check that nothing is lost or done twice.

`OFFBEAT_CRASH_AT` lists points, separated by commas; `name:3` kills a process when it passes the point `name` for the
third time. The process gets SIGKILL, so nothing is flushed. `name!stop` freezes it with SIGSTOP instead, and
`name!exit` ends it with status 1. If `OFFBEAT_CRASH_ONCE` names a folder, each point kills
only one process, and leaves a file with the point's name there. So a restarted process gets past the point.
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
        "submission-stored",  # on disk, not yet acknowledged
        "claim-chosen",  # batch chosen, transaction not yet committed
        "claim-stored",  # committed, not yet answered
        "step-committed",  # committed, version not yet announced
        "evaluation-admitted",  # admitted, workers not yet notified
    ),
    "trainer": (
        "reconciled",  # with the ledger; weights not yet published
        "batch-claimed",
        "version-written",  # on disk, not yet committed
        "version-committed",  # metrics of the step not yet reported
        "snapshot-taken",  # of a checkpoint, in memory only
        "checkpoint-drafted",  # on disk under a name that no resume reads
        "checkpoint-saved",  # not yet reported
    ),
    "rank": (
        "order-given",  # to the other ranks, rank 0 has not begun it
        "order-received",  # by another rank, which has not begun it
        "parts-coded",  # of a version, by another rank; rank 0 not yet answered
        "rows-written",  # of a checkpoint, by any rank; not yet noted
    ),
    "worker": (
        "version-fetched",  # not yet loaded
        "task-leased",  # not yet begun
        "generated",  # in memory only
        "spooled",  # not yet sent
        "acknowledged",  # still in the spool
    ),
    "receiver": (
        "manifest-kept",  # verified, no piece fetched yet
        "piece-arrived",  # complete, not yet renamed
        "pieces-fetched",  # all of them, version not yet built
        "version-built",  # not yet reported
        "half-forgotten",  # old versions deleted, their pieces not yet
    ),
}
"""Names of all crash points, by the role of the process that passes them."""

_wanted = os.environ.get(AT)
"""Value of `OFFBEAT_CRASH_AT`, read only once, because some points are passed for every trajectory."""
_passed: Counter[str] = Counter()


def crash_here(point: str) -> None:
    if _wanted is None:
        return
    _passed[point] += 1
    for entry in _wanted.split(","):
        where, _, how = entry.partition("!")
        name, _, time = where.partition(":")
        if name == point and _passed[point] == int(time or 1) and _is_first(point):
            if how == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def _is_first(point: str) -> bool:
    """Returns whether this process is the first to die at this point. If so, creates the file from which later
    processes know that. Without `OFFBEAT_CRASH_ONCE`, returns True and creates nothing."""
    folder = os.environ.get(ONCE)
    if folder is None:
        return True
    try:
        os.close(os.open(Path(folder) / point, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
