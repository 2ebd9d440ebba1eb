"""Why the ledger says no. Each kind asks something else of the caller."""

from __future__ import annotations

from offbeat.errors import DiskError, OffbeatError, UserError


class LedgerError(OffbeatError):
    """The ledger did not do what was asked, and changed nothing."""


class Damaged(LedgerError, DiskError):
    """The file itself cannot be read or written, as on a full disk: whatever is asked, until someone mends that."""


class NoLedger(UserError):
    """A file without a ledger's tables: something else, or a disk was full before they were written."""


class Unknown(LedgerError, LookupError):
    """A task, group, batch or version that the ledger never heard of."""


class Refused(LedgerError, ValueError):
    """Well formed, but it may not be stored; asking again will not help."""


class Conflict(LedgerError):
    """The same thing was already stored with another content."""


class Fenced(LedgerError):
    """A lease that is over: its task went to someone else, or has ended. What it led to is to be discarded."""


class Forbidden(LedgerError):
    """Not this worker's to touch."""
