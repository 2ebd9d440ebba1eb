"""The ledger's file: how it is opened and written, and where it may lie.

Guarantees: a committed transaction survives `kill -9` and a power cut (WAL, `synchronous=FULL`); a file of a newer
schema, a file that is no ledger and a network file system are refused before anything is written.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import UserError
from offbeat.ledger.blobs import FOLDER, Blobs
from offbeat.ledger.errors import Damaged, NoLedger
from offbeat.ledger.tables import SCHEMA, TABLES

BUSY_TIMEOUT_S = 10.0
"""How long a write waits for another process, such as one that reads the ledger to verify it."""
MAX_ROWS = 64
"""Inserted with one statement."""
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ncpfs", "coda", "davfs", "fuse.davfs2"),
    *("ceph", "fuse.ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.glusterfs", "orangefs", "pvfs2", "wekafs"),
    *("gfs2", "ocfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.juicefs"),
}
"""Their locks and shared memory do not carry SQLite's write-ahead log."""

REMEDIES = {
    "FULL": "free space on its disk",
    "IOERR": "see that its disk works and has space",
    "CORRUPT": "bring back a copy (offbeat ledger verify tells what is damaged)",
    "NOTADB": "bring back a copy",
    "BUSY": "end the process that holds it",
    "LOCKED": "end the process that holds it",
    "READONLY": "make it writable",
    "CANTOPEN": "see that its folder can be written and has space",
}
"""What to do, by the kind of error that SQLite reports about a file."""


class Database:
    """One connection, its clock for people, and its transactions."""

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        must_exist: bool = False,
        wall_clock: Callable[[], float] = time.time,
    ):
        self.path, self.wall_clock = path, wall_clock
        self.blobs = Blobs(path.parent / FOLDER)
        self.connection = _connect(path, read_only, must_exist or read_only)
        self.execute, self.executemany = self.connection.execute, self.connection.executemany

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block is on disk when it ends, or none of it; inside another one, when that ends."""
        is_inner = self.connection.in_transaction
        self.execute("SAVEPOINT inner" if is_inner else "BEGIN IMMEDIATE")
        try:
            yield
            self.execute("RELEASE inner" if is_inner else "COMMIT")
        except BaseException:
            if self.connection.in_transaction:  # a full disk has ended it already
                self.execute("ROLLBACK TO inner" if is_inner else "ROLLBACK")
                if is_inner:
                    self.execute("RELEASE inner")
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads of the block see the same moment, whoever writes meanwhile."""
        self.execute("BEGIN")
        try:
            yield
        finally:
            self.execute("ROLLBACK")

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turns what SQLite says of the disk or the file into `Damaged`; what it says of our queries is a bug."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise
        except sqlite3.DatabaseError as error:
            if (remedy := _remedy(error)) is None:
                raise
            raise Damaged(f"{self.path}: {error}; {remedy}, then --resume the run") from error

    def insert(self, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Inserts rows, many with one statement: to start one costs as much as to insert a row. `into` names table and
        columns."""
        begin = 0
        while begin < len(rows):
            count = 1 << min(len(rows) - begin, MAX_ROWS).bit_length() - 1  # powers of two: few statements to prepare
            values = itertools.chain.from_iterable(rows[begin : begin + count])
            self.execute(_insertion(into, len(rows[begin]), count), tuple(values))
            begin += count

    def check_pages(self, within_s: float) -> None:
        """Raises if pages of the file are damaged, as far as a look at it within this time can tell."""
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
                f"{self.path}: is damaged ({' '.join(found[0].split())}); bring back a copy, then --resume (offbeat "
                "ledger verify tells more)"
            )

    def close(self) -> None:
        self.connection.close()


@lru_cache(maxsize=64)
def _insertion(into: str, num_columns: int, num_rows: int) -> str:
    row = f"({', '.join('?' * num_columns)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * num_rows)}"


def array(numbers: Iterable[int]) -> str:
    """Numbers as a query takes them: `IN (SELECT value FROM json_each(?))`."""
    return msgspec.json.encode(list(numbers)).decode()


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The kind of network file system that `path` lies on; None where it is local, or where nobody can tell."""
    if not mounts.exists():
        return None
    place = str(path.resolve())
    best, kind = "", None
    for line in mounts.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two mounts on one place the later one hides the earlier
            best, kind = mount, fields[2]
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def _connect(path: Path, read_only: bool, must_exist: bool) -> sqlite3.Connection:
    kind = network_file_system(path)
    if kind is not None:
        raise UserError(
            f"{path}: lies on a network file system ({kind}), where SQLite can lose data; set run.dir local"
        )
    if must_exist and not path.exists():
        raise UserError(f"{path}: no ledger here")
    try:
        # One thread writes, but it need not be the thread that opened the ledger.
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, read_only, must_exist)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        remedy = _remedy(error)
        raise UserError(f"{path}: cannot be used as a ledger: {error}{f'; {remedy}' if remedy else ''}") from error
    return connection


def _remedy(error: sqlite3.DatabaseError) -> str | None:
    return REMEDIES.get(getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_").partition("_")[0])


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool, must_exist: bool) -> None:
    found = _schema_of(connection, path)
    if found is None and must_exist:
        raise NoLedger(f"{path}: holds no ledger")
    if found is not None and found > SCHEMA:
        raise UserError(f"{path}: written by a newer Offbeat (schema {found}; this one reads {SCHEMA}); upgrade")
    if found is not None and found < SCHEMA:
        raise UserError(
            f"{path}: written by an older Offbeat (schema {found}; this one reads {SCHEMA}); finish the run with it"
        )
    connection.execute("PRAGMA foreign_keys = ON")
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if found is None:
        connection.executescript(f"BEGIN IMMEDIATE; {TABLES} INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")


def _schema_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """The file's schema; None where it is empty."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "meta" not in tables:
        raise UserError(f"{path}: an SQLite file, but no ledger of Offbeat")
    return int(connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0])
