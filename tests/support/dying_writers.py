"""`offbeat train` that is killed while something is being written behind a step: dying_writers.py WHAT STEP ARGUMENTS.

WHAT is `checkpoint` or `version`, and STEP the step whose checkpoint or version never gets to the disk. The process
kills itself when the next step is trained. A step takes so long here that the batch after it is always there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from offbeat.cli.main import main
from offbeat.trainer import trainer
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.weights.publish import Publisher

STEP_S = 1.5
WITHIN_S = 60.0

changed, num_trained = threading.Condition(), 0
train_step = trainer.train_step


def slow_step(*given: Any) -> Any:
    global num_trained
    metrics = train_step(*given)
    time.sleep(STEP_S)
    with changed:
        num_trained += 1
        changed.notify_all()
    return metrics


def die_when_trained(num_more: int) -> None:
    with changed:
        wanted = num_trained + num_more
        if changed.wait_for(lambda: num_trained >= wanted, WITHIN_S):
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(f"no step was trained within {WITHIN_S:.0f} s")


def arm(what: str, at: int) -> None:
    trainer.train_step = slow_step  # type: ignore[assignment]
    owner, name = {"checkpoint": (Checkpoints, "save"), "version": (Publisher, "write")}[what]
    write = getattr(owner, name)

    def writes(self: Any, *given: Any, **how: Any) -> Any:
        step = given[0] if what == "checkpoint" else given[1]
        if step == at:
            die_when_trained(2 if what == "checkpoint" else 1)  # the first of the two is published and committed, too
        return write(self, *given, **how)

    setattr(owner, name, writes)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
