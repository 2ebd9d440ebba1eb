"""Places where a process can be made to die, so that tests can prove that nothing is lost or doubled there.

`OFFBEAT_CRASH_AT` names them, with commas between; `name:3` means the third time that a process comes by. Whoever comes
by kills itself as a power cut would: nothing is flushed, nobody is told. With `OFFBEAT_CRASH_ONCE`, a folder, each
place kills one process only and leaves a file of its name there as a witness, so that a run which starts its processes
again gets past it. Without the variable a call does nothing.
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
        "claim-stored",  # committed, not told
        "step-committed",  # trained, the version not announced
        "evaluation-admitted",  # and nobody was told that there is work
    ),
    "trainer": (
        "reconciled",  # with the ledger, before the weights are published
        "batch-claimed",
        "version-written",  # on disk, not committed
        "version-committed",  # the step's row not reported
        "checkpoint-saved",  # not told
    ),
    "worker": (
        "version-fetched",  # not loaded
        "task-leased",  # not begun
        "generated",  # nowhere but in memory
        "spooled",  # not sent
        "acknowledged",  # still in the spool
    ),
    "receiver": (
        "manifest-kept",  # believed, and no piece of it here
        "piece-arrived",  # whole, without its name
        "pieces-fetched",  # all of them, the version not built
        "version-built",  # and nobody told
        "half-forgotten",  # old versions are gone, their pieces are not
    ),
}
"""Every place, by the role that comes by."""

_wanted = os.environ.get(AT)
"""Read once: some places are passed for every trajectory."""
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
    """Whether no process died here before, where that matters."""
    folder = os.environ.get(ONCE)
    if folder is None:
        return True
    try:
        os.close(os.open(Path(folder) / point, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
