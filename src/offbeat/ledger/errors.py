"""Errors of the ledger, one kind for each way in which a caller should react."""

from __future__ import annotations

from offbeat.errors import DiskError, OffbeatError, UserError


class LedgerError(OffbeatError):
    """A call was refused or failed, and changed nothing."""


class Damaged(LedgerError, DiskError):
    """The file cannot be read or written, as on a full disk; every call fails until that is remedied."""


class NoLedger(UserError):
    """A file without a ledger's tables: something else, or a disk was full before they were written."""


class Unknown(LedgerError, LookupError):
    """A task, group, batch, version or worker that the ledger does not have."""


class Refused(LedgerError, ValueError):
    """Well formed, but not allowed; a retry will not help."""


class Conflict(LedgerError):
    """Already stored with other content."""


class Fenced(LedgerError):
    """The lease is over: its task went to another worker, or has ended. Discard its result."""


class Forbidden(LedgerError):
    """Belongs to another worker, or needs another token."""
