"""The errors that Offbeat raises.

`UserError` is a mistake that a person can correct: the command line prints its one-line message and exits with status
2. All other errors that Offbeat raises on purpose are also kinds of `OffbeatError`; any other exception is a bug.
"""

import itertools
import os
import traceback

PACKAGE, IPYTHON = os.path.dirname(__file__) + os.sep, f"{os.sep}IPython{os.sep}"


class OffbeatError(Exception):
    """A failure that Offbeat expects and can describe."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows in a notebook: the user's own lines that led to the error, and its
        message. The rest of the traceback is about Offbeat and would hide the message."""
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if IPYTHON not in frame.filename]
        own = itertools.takewhile(lambda frame: not frame.filename.startswith(PACKAGE), frames)
        return [*(f"----> {frame.lineno} {frame.line}" for frame in own), f"{type(self).__name__}: {self}"]


class UserError(OffbeatError, ValueError):
    """The user's input, or a file that it names, is wrong; the message says what, where, and how to correct it."""


class DiskError(OffbeatError):
    """A file cannot be written, for example because the disk is full; the message names the file and the remedy."""


class DeadlineError(OffbeatError, TimeoutError):
    """A wait exceeded its deadline; the message says what was waited for, and how long."""


class RunOver(OffbeatError):
    """The run has ended, so its workers have nothing left to do; not a failure."""


class RunInterrupted(RunOver):
    """The run was stopped before its last step, and may be resumed; the message names the step, such as "stopped at
    step 3 of 12"."""


class RunStopped(OffbeatError):
    """A run stopped by itself, because it could not go on or would have spoiled the training; the message says why."""
