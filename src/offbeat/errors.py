"""The errors Offbeat raises, by who can mend them.

`UserError` is a mistake that a person can correct: the command line prints its one line and exits with status 2.
Everything else that we raise on purpose is an `OffbeatError`; anything else is a bug.
"""


class OffbeatError(Exception):
    """A failure that Offbeat foresaw and can name."""


class UserError(OffbeatError, ValueError):
    """Something a user wrote or pointed at is wrong; the message says what, where, and how to mend it."""


class DiskError(OffbeatError):
    """A file cannot be written, as on a full disk; the message names it, and says what to do before going on."""


class DeadlineError(OffbeatError, TimeoutError):
    """A wait ran past its deadline; the message names who was waited for and for how long."""


class RunOver(OffbeatError):
    """The run has ended, so that whoever works for it has nothing left to do; not a failure of anybody."""


class RunStopped(OffbeatError):
    """A run ended itself to protect the user's training; the message says why."""
