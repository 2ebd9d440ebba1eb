"""The ledger's file: opening, transactions and disk errors.

Guarantees: a committed transaction survives `kill -9` and a power cut (WAL, `synchronous=FULL`). A file with another
schema, a file that is not a ledger and a file on a network file system are refused before anything is written.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from offbeat.errors import UserError
from offbeat.ledger.bodies import FOLDER, Blobs, Bodies
from offbeat.ledger.errors import Damaged, NoLedger
from offbeat.ledger.records import LedgerTerms
from offbeat.ledger.tables import SCHEMA, TABLES

D = TypeVar("D", bound="Database")
P = ParamSpec("P")
R = TypeVar("R")

NO_TERMS = LedgerTerms()
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for another process, such as `offbeat ledger verify`, to release the file."""
MAX_ROWS = 64
"""Maximum number of rows that one statement inserts."""
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ncpfs", "coda", "davfs", "fuse.davfs2"),
    *("ceph", "fuse.ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.glusterfs", "orangefs", "pvfs2", "wekafs"),
    *("gfs2", "ocfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.juicefs"),
}
"""File systems on which SQLite's write-ahead log is unsafe, because their locks or shared memory are unreliable."""

REMEDIES = {
    "FULL": "free space on its disk",
    "IOERR": "check that its disk works and has free space",
    "CORRUPT": "restore the file from a backup (offbeat ledger verify lists the damage)",
    "NOTADB": "restore the file from a backup",
    "BUSY": "end the other process that uses the file",
    "LOCKED": "end the other process that uses the file",
    "READONLY": "make the file writable",
    "CANTOPEN": "check that its folder is writable and its disk has free space",
}
"""Remedy for each kind of file error. The key is the word after `SQLITE_` in the name of SQLite's error."""


def transactional(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Decorates a method of the ledger to run as one transaction."""

    @wraps(method)
    def run(self: D, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.transaction():
            return method(self, *args, **kwargs)

    return run


class Database:
    """Connection to the ledger's file, with transactions, the run's settings for the ledger (`terms`) and a wall clock.
    All parts of `Ledger` derive from this class."""

    def __init__(
        self,
        path: Path | str,
        terms: LedgerTerms = NO_TERMS,
        *,
        read_only: bool = False,
        must_exist: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ):
        """Opens or creates the ledger at `path`. With `must_exist` or `read_only`, refuses a missing or empty file."""
        self.path, self.terms, self.wall_clock = Path(path), terms, wall_clock
        self.blobs = Blobs(self.path.parent / FOLDER)
        self.connection = _connect(self.path, read_only, must_exist or read_only)
        self.execute, self.executemany = self.connection.execute, self.connection.executemany
        self.bodies = Bodies(self.execute, self.blobs)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes the block atomic, and durable when it ends. A nested block becomes durable with the outer one."""
        is_inner = self.connection.in_transaction
        self.execute("SAVEPOINT inner" if is_inner else "BEGIN IMMEDIATE")
        try:
            yield
            self.execute("RELEASE inner" if is_inner else "COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # False if a full disk has ended the transaction
                self.execute("ROLLBACK TO inner" if is_inner else "ROLLBACK")
                if is_inner:
                    self.execute("RELEASE inner")
            raise

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes `calls` in one transaction and returns each call's result or error; a failed call changes nothing.
        Raises if an error ends the transaction itself, such as a full disk; then no call has changed anything."""
        results: list[Any] = []
        with self.transaction():
            for call in calls:
                try:
                    with self.naming_damage():
                        results.append(call())
                except Exception as error:
                    if not self.connection.in_transaction:
                        raise
                    results.append(error)
        return results

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Makes all reads in the block see the same state, despite concurrent writers."""
        self.execute("BEGIN")
        try:
            yield
        finally:
            self.execute("ROLLBACK")

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turns SQLite's errors about the disk or file into `Damaged` with a remedy; other errors pass unchanged."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise
        except sqlite3.DatabaseError as error:
            if (remedy := _remedy(error)) is None:
                raise
            raise Damaged(f"ledger {self.path}: {error}; {remedy}, then resume the run") from error

    def insert(self, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Inserts rows into `into`, given as "table (columns)". One statement inserts many rows, because starting a
        statement costs as much as a row."""
        begin = 0
        while begin < len(rows):
            count = 1 << min(len(rows) - begin, MAX_ROWS).bit_length() - 1  # powers of two: few statements to prepare
            values = itertools.chain.from_iterable(rows[begin : begin + count])
            self.execute(_insertion(into, len(rows[begin]), count), tuple(values))
            begin += count

    def check_pages(self, within_s: float) -> None:
        """Checks the file for at most `within_s` seconds; raises `UserError` if a page is damaged."""
        deadline_s = time.monotonic() + within_s
        self.connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 100_000)
        try:
            found = [line for (line,) in self.execute("PRAGMA quick_check(1)") if line != "ok"]
        except sqlite3.DatabaseError as error:
            found = [] if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT" else [str(error)]
        finally:
            self.connection.set_progress_handler(None, 0)
        if found:
            raise UserError(
                f"ledger {self.path} is damaged ({' '.join(found[0].split())}); restore it from a backup, then "
                "resume the run (offbeat ledger verify lists the damage)"
            )


@lru_cache(maxsize=64)
def _insertion(into: str, num_columns: int, num_rows: int) -> str:
    row = f"({', '.join('?' * num_columns)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * num_rows)}"


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Returns the kind of network file system that holds `path`; None if the file system is local or unknown."""
    if not mounts.exists():
        return None
    resolved = str(path.resolve())
    best, kind = "", None
    for line in mounts.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # a later mount hides an earlier one at the same point
            best, kind = mount, fields[2]
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def _connect(path: Path, read_only: bool, must_exist: bool) -> sqlite3.Connection:
    kind = network_file_system(path)
    if kind is not None:
        raise UserError(
            f"ledger {path} is on a network file system ({kind}), on which SQLite can lose data; set run.dir to a "
            "folder on a local disk"
        )
    if must_exist and not path.exists():
        raise UserError(f"ledger {path} does not exist; check the path of the run's folder")
    try:
        # One thread at a time uses the connection, not always the one that opened it.
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, read_only, must_exist)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        remedy = _remedy(error)
        raise UserError(f"{path} cannot be used as a ledger: {error}{f'; {remedy}' if remedy else ''}") from error
    return connection


def _remedy(error: sqlite3.DatabaseError) -> str | None:
    return REMEDIES.get(getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_").partition("_")[0])


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool, must_exist: bool) -> None:
    found = _schema_of(connection, path)
    if found is None and must_exist:
        raise NoLedger(f"{path} is empty: it contains no ledger; check the path")
    if found is not None and found > SCHEMA:
        raise UserError(
            f"{path} was written by a newer Offbeat (schema {found}; this one reads {SCHEMA}); upgrade Offbeat"
        )
    if found is not None and found < SCHEMA:
        from offbeat.ledger.migrations import MIGRATIONS  # here, because it imports this module

        remedy = (
            "resume the run once to upgrade the file" if found in MIGRATIONS else "finish the run with that Offbeat"
        )
        raise UserError(f"{path} was written by an older Offbeat (schema {found}; this one reads {SCHEMA}); {remedy}")
    connection.execute("PRAGMA foreign_keys = ON")
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if found is None:
        connection.executescript(f"BEGIN IMMEDIATE; {TABLES} INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")


def _schema_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """Returns the schema number of the file; None if the file is empty."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "meta" not in tables:
        raise UserError(f"{path} is an SQLite file, but not a ledger of Offbeat; check the path")
    return int(connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0])


def array(numbers: Iterable[int]) -> str:
    """Encodes numbers as a JSON array, for a query with `IN (SELECT value FROM json_each(?))`."""
    return msgspec.json.encode(list(numbers)).decode()
