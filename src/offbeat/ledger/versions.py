"""Published versions: their numbers, and the parent from which each was trained.

Guarantees: a number is never reused. A new version's parent is living (not abandoned). It is of the previous step, or
of the same step if a resume published the same weights again under a new number. So the living versions form one line,
and living versions of the same step have the same weights: a task that requires one of them may use another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.weights.version import Version

COLUMNS = "number, step, parent, digest, path, manifest"
HERE = "./"
"""Prefix of a stored path that is relative to the ledger's folder."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Step of a version, and whether a resume abandoned the version."""

    step: int
    is_abandoned: bool

    @property
    def living_step(self) -> int | None:
        return None if self.is_abandoned else self.step


class Versions(Database):
    def latest_version(self) -> Version | None:
        """Returns the newest version that is not abandoned; the next step is trained from it. None before the first
        version."""
        row = self.execute(
            f"SELECT {COLUMNS} FROM versions NOT INDEXED WHERE abandoned = 0 ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return None if row is None else _version(self, row)

    def version(self, number: int) -> Version:
        """Returns a published version, abandoned or not; raises `Unknown` if it was never published."""
        found = find(self, number)
        if found is None:
            raise Unknown(f"version {number} was never published in this run")
        return found[0]

    def versions_in_use(self) -> list[int]:
        """Returns the numbers of the two latest living versions, and of every version that an open group requires. The
        second latest is in use because a worker may still be fetching it."""
        query = """SELECT number FROM (SELECT number FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 2)
                   UNION SELECT require_version FROM groups WHERE state = 'open' AND require_version IS NOT NULL"""
        return [number for (number,) in self.execute(query)]

    def versions_needed(self, checkpoint_step: int) -> list[int]:
        """Returns the numbers of the versions whose weights may still be requested: `versions_in_use`, and all versions
        whose step is not below the smallest of three steps. These are `checkpoint_step` (negative: no checkpoint), the
        step of the oldest version with which an untrained group was begun, and that of the second latest living
        version."""
        query = """SELECT MIN(first_step) FROM groups WHERE state IN ('open', 'ready', 'claimed')"""
        begun = self.execute(query).fetchone()[0]
        latest_two = "SELECT step FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 2"
        steps = [step for (step,) in self.execute(latest_two)] + ([] if begun is None else [begun])
        if checkpoint_step >= 0:
            steps.append(checkpoint_step)
        query = "SELECT number FROM versions WHERE step >= ? ORDER BY number"
        recent = [number for (number,) in self.execute(query, (min(steps, default=0),))]
        return sorted({*recent, *self.versions_in_use()})

    def next_version_number(self) -> int:
        return int(self.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM versions").fetchone()[0])

    @transactional
    def publish(self, version: Version) -> None:
        """Records a version that `commit` does not record: a run's first version, the weights of a resumed checkpoint
        under a new number, or the version of a trained batch whose commit was lost."""
        if is_recorded(self, version):
            return
        if version.parent is None:
            if self.execute("SELECT 1 FROM versions LIMIT 1").fetchone():
                raise Refused(f"version {version.number} has no parent; only a run's first version may have none")
        else:
            _check_step(self, version)
        record(self, version)


def find(db: Database, number: int) -> tuple[Version, bool] | None:
    """Returns the version with this number and whether it is abandoned; None if it was never published."""
    row = db.execute(f"SELECT {COLUMNS}, abandoned FROM versions WHERE number = ?", (number,)).fetchone()
    return None if row is None else (_version(db, row[:6]), bool(row[6]))


def living_at(db: Database, step: int) -> Version | None:
    """Returns the newest version of a step that is not abandoned; None if the step has none."""
    query = f"SELECT {COLUMNS} FROM versions WHERE abandoned = 0 AND step = ? ORDER BY number DESC LIMIT 1"
    row = db.execute(query, (step,)).fetchone()
    return None if row is None else _version(db, row)


def lineage(db: Database, numbers: Iterable[int]) -> dict[int, Lineage]:
    """Returns the `Lineage` of each version in `numbers`, by number. Versions that were never published are left
    out."""
    query = "SELECT number, step, abandoned FROM versions WHERE number IN (SELECT value FROM json_each(?))"
    rows = db.execute(query, (array(set(numbers)),))
    return {number: Lineage(step, bool(abandoned)) for number, step, abandoned in rows}


def lineage_and_step(db: Database, numbers: Iterable[int]) -> tuple[dict[int, Lineage], int]:
    """Returns the `Lineage` of each version in `numbers` and of the newest living (not abandoned) version, by number.
    Also returns the step of that newest version, 0 if there is none."""
    query = """SELECT number, step, abandoned FROM versions WHERE number IN (
                   SELECT value FROM json_each(?) UNION ALL SELECT * FROM (
                       SELECT number FROM versions NOT INDEXED WHERE abandoned = 0 ORDER BY number DESC LIMIT 1))"""
    rows = db.execute(query, (array(numbers),))
    known = {number: Lineage(step, bool(abandoned)) for number, step, abandoned in rows}
    newest = max((number for number, line in known.items() if not line.is_abandoned), default=None)
    return known, 0 if newest is None else known[newest].step


def _check_step(db: Versions, version: Version) -> None:
    parent = living_parent(db, version)
    if version.step == parent.step:
        if version.digest != parent.digest:
            raise Conflict(
                f"version {version.number} and its parent, version {parent.number}, are both of step {parent.step}, "
                f"but their weights differ: digests {version.digest} and {parent.digest}"
            )
        return
    owed = db.execute(
        "SELECT id FROM batches WHERE step = ? AND state = 'trained' AND to_version IS NULL", (parent.step,)
    ).fetchone()
    if version.step != parent.step + 1 or owed is None:
        raise Refused(
            f"version {version.number} of step {version.step} cannot follow version {parent.number} of step "
            f"{parent.step}, because no trained batch lies between them; commit the batch of step {parent.step}"
        )


def living_parent(db: Versions, version: Version) -> Version:
    """Returns the parent of a new version. Raises `Refused` if the parent was never published, is abandoned or is not
    of the latest step."""
    if version.parent is None:
        raise Refused(f"version {version.number} names no parent; only the first version of a run may have none")
    if (found := find(db, version.parent)) is None:
        raise Refused(f"version {version.number} names parent {version.parent}, which was never published")
    parent, is_abandoned = found
    if is_abandoned:
        raise Refused(f"version {version.number} names parent {version.parent}, which a resume has abandoned")
    newest = db.latest_version()
    assert newest is not None, "the parent is not abandoned, so the ledger has a latest version; this is a bug"
    if parent.step != newest.step:
        raise Refused(
            f"version {version.number} names parent {version.parent}, which is not of the latest step; the latest "
            f"version is {newest.number} of step {newest.step}"
        )
    return parent


def is_recorded(db: Database, version: Version) -> bool:
    """Whether this version is already stored; raises `Conflict` if a different version has its number."""
    found = find(db, version.number)
    if found is None:
        return False
    stored = found[0]
    if any(getattr(stored, name) != getattr(version, name) for name in ("step", "parent", "digest", "manifest")):
        raise Conflict(
            f"version {version.number} was already published with step {stored.step}, parent {stored.parent} and "
            f"digest {stored.digest}; publish different weights under a new number"
        )
    return True


def record(db: Versions, version: Version) -> None:
    """Stores a new version. Also stores its number in the batch that produced it, in an already claimed batch of its
    step, and in the open groups that require its step."""
    smallest = db.next_version_number()
    if version.number < smallest:
        raise Refused(f"version number {version.number} is too low; numbers only grow, and the next is {smallest}")
    db.execute(
        f"INSERT INTO versions ({COLUMNS}, published_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*_row(db, version), db.wall_clock()),
    )
    db.execute(
        "UPDATE batches SET to_version = ?, from_version = ? "
        "WHERE step = ? AND state = 'trained' AND to_version IS NULL",
        (version.number, version.parent, version.step - 1),
    )
    db.execute(
        "UPDATE batches SET from_version = ? WHERE step = ? AND state = 'claimed'", (version.number, version.step)
    )
    db.execute(
        "UPDATE groups SET require_version = ? WHERE state = 'open' AND require_step = ?",
        (version.number, version.step),
    )


def _row(db: Database, version: Version) -> tuple[int, int, int | None, str, str, str]:
    """Returns a version's row of the table `versions`, with the columns in `COLUMNS`. A path inside the ledger's folder
    becomes relative, so that a run can be moved."""
    folder, path = db.path.parent.absolute(), version.path
    stored = f"{HERE}{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)
    return version.number, version.step, version.parent, version.digest, stored, version.manifest


def _version(db: Database, row: tuple[int, int, int | None, str, str, str]) -> Version:
    number, step, parent, digest, stored, manifest = row
    path = db.path.parent.absolute() / stored if stored.startswith(HERE) else Path(stored)
    return Version(number=number, step=step, parent=parent, digest=digest, path=path, manifest=manifest)
