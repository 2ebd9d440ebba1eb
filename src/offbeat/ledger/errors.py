"""Errors of the ledger, one kind for each way in which a caller should react."""

from __future__ import annotations

from offbeat.errors import DiskError, OffbeatError, UserError


class LedgerError(OffbeatError):
    """A call was refused or failed, and changed nothing."""


class Damaged(LedgerError, DiskError):
    """The ledger's file cannot be read or written, for example on a full disk; calls fail until that is fixed."""


class NoLedger(UserError):
    """The file has no ledger tables: it is another file, or the disk was full before the tables were written."""


class Unknown(LedgerError, LookupError):
    """The ledger has no such task, group, batch, version or worker."""


class Refused(LedgerError, ValueError):
    """The request is well formed, but not allowed; a retry will not help."""


class Conflict(LedgerError):
    """The record is already stored with different content."""


class Fenced(LedgerError):
    """The lease is over: its task was leased again or has ended. The worker must discard its result."""


class Forbidden(LedgerError):
    """The task or object belongs to another worker, or the caller needs another access token."""


ENVIRONMENT, LOST_ENVIRONMENT = "environment", "environment_lost"
"""Kinds of failed attempts at episodes, with which a worker's reason begins: the environment failed; or it was lost
with its process, and the tokens that were handed back are of no use without it."""
FAILURE_KINDS = (ENVIRONMENT, LOST_ENVIRONMENT)
