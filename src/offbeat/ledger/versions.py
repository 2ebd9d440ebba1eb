"""Published versions: numbers that only grow, one living line, and groups bound to the version of their step.

Guarantees: a number is never reused; a version's parent is alive, and of the same step (the same weights under a new
number, after a resume) or of the step before. So the living versions form one line, and living versions of one step are
the same weights: what requires one of them is served as well by another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Conflict, Refused
from offbeat.weights.version import Version

COLUMNS = "number, step, parent, digest, path, manifest"
HERE = "./"
"""How a path begins that is meant from the ledger's own folder."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What the bound needs to know of a version."""

    step: int
    is_abandoned: bool

    @property
    def living_step(self) -> int | None:
        return None if self.is_abandoned else self.step


def latest(db: Database) -> Version | None:
    """The newest version that is not abandoned: the one trained from next."""
    row = db.execute(f"SELECT {COLUMNS} FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 1").fetchone()
    return None if row is None else _version(db, row)


def find(db: Database, number: int) -> tuple[Version, bool] | None:
    """A version by its number, and whether it is abandoned."""
    row = db.execute(f"SELECT {COLUMNS}, abandoned FROM versions WHERE number = ?", (number,)).fetchone()
    return None if row is None else (_version(db, row[:6]), bool(row[6]))


def living_at(db: Database, step: int) -> Version | None:
    """The newest living version of a step."""
    query = f"SELECT {COLUMNS} FROM versions WHERE abandoned = 0 AND step = ? ORDER BY number DESC LIMIT 1"
    row = db.execute(query, (step,)).fetchone()
    return None if row is None else _version(db, row)


def in_use(db: Database) -> list[int]:
    """The latest living version, the one before, which a worker may be fetching, and those that open tasks require."""
    query = """SELECT number FROM (SELECT number FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 2)
               UNION SELECT require_version FROM groups WHERE state = 'open' AND require_version IS NOT NULL"""
    return [number for (number,) in db.execute(query)]


def needed(db: Database, checkpoint_step: int) -> list[int]:
    """Versions that somebody may still ask for: from the oldest on that a group was begun with and is not trained yet,
    or that a checkpoint knows, up to the newest; and those that open tasks require."""
    query = """SELECT MIN(first_step) FROM groups WHERE state IN ('open', 'ready', 'claimed')"""
    begun = db.execute(query).fetchone()[0]
    latest_two = "SELECT step FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 2"
    steps = [step for (step,) in db.execute(latest_two)] + ([] if begun is None else [begun])
    if checkpoint_step >= 0:
        steps.append(checkpoint_step)
    query = "SELECT number FROM versions WHERE step >= ? ORDER BY number"
    recent = [number for (number,) in db.execute(query, (min(steps, default=0),))]
    return sorted({*recent, *in_use(db)})


def next_number(db: Database) -> int:
    return int(db.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM versions").fetchone()[0])


def lineage(db: Database, numbers: Iterable[int]) -> dict[int, Lineage]:
    """Step and fate of the versions asked for; an unknown one is missing."""
    query = "SELECT number, step, abandoned FROM versions WHERE number IN (SELECT value FROM json_each(?))"
    rows = db.execute(query, (array(set(numbers)),))
    return {number: Lineage(step, bool(abandoned)) for number, step, abandoned in rows}


def lineage_and_step(db: Database, numbers: Iterable[int]) -> tuple[dict[int, Lineage], int]:
    """The same, with the newest living version beside them, and the step that the run is at."""
    query = """SELECT number, step, abandoned FROM versions WHERE number IN (
                   SELECT value FROM json_each(?) UNION ALL SELECT * FROM (
                       SELECT number FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 1))"""
    rows = db.execute(query, (array(numbers),))
    known = {number: Lineage(step, bool(abandoned)) for number, step, abandoned in rows}
    newest = max((number for number, line in known.items() if not line.is_abandoned), default=None)
    return known, 0 if newest is None else known[newest].step


def publish(db: Database, version: Version) -> None:
    """Records a version that no batch made: a run's first, or a checkpoint's weights under a new number."""
    if is_recorded(db, version):
        return
    if version.parent is None:
        if db.execute("SELECT 1 FROM versions LIMIT 1").fetchone():
            raise Refused(f"version {version.number}: only a run's first version has no parent")
    else:
        _check_step(db, version)
    record(db, version)


def _check_step(db: Database, version: Version) -> None:
    parent = living_parent(db, version)
    if version.step == parent.step:
        if version.digest != parent.digest:
            raise Conflict(
                f"version {version.number} names {parent.number} of the same step {parent.step} as its parent, but has "
                f"other weights: digest {version.digest} instead of {parent.digest}"
            )
        return
    owed = db.execute(
        "SELECT id FROM batches WHERE step = ? AND state = 'trained' AND to_version IS NULL", (parent.step,)
    ).fetchone()
    if version.step != parent.step + 1 or owed is None:
        raise Refused(
            f"version {version.number} of step {version.step} cannot follow version {parent.number} of step "
            f"{parent.step} without a batch: commit the batch of step {parent.step}"
        )


def living_parent(db: Database, version: Version) -> Version:
    """The parent, if the version may stand on it."""
    found = None if version.parent is None else find(db, version.parent)
    if found is None:
        raise Refused(f"version {version.number}: its parent {version.parent} was never published")
    parent, is_abandoned = found
    newest = latest(db)
    if is_abandoned:
        raise Refused(f"version {version.number}: its parent {version.parent} is abandoned")
    if newest is None or parent.step != newest.step:
        newest_is = "none" if newest is None else f"{newest.number} of step {newest.step}"
        raise Refused(f"version {version.number}: its parent {version.parent} is not the latest, which is {newest_is}")
    return parent


def is_recorded(db: Database, version: Version) -> bool:
    """Whether this very version is there already; another one of its number is a conflict."""
    found = find(db, version.number)
    if found is None:
        return False
    stored = found[0]
    told = (version.step, version.parent, version.digest, version.manifest)
    if (stored.step, stored.parent, stored.digest, stored.manifest) != told:
        raise Conflict(
            f"version {version.number} was published as step {stored.step}, parent {stored.parent}, digest "
            f"{stored.digest}; a number is never reused"
        )
    return True


def record(db: Database, version: Version) -> None:
    """Stores a new version, completes the batch that made it, and binds to it the open groups of its step."""
    smallest = next_number(db)
    if version.number < smallest:
        raise Refused(f"version {version.number}: numbers only grow, the next is {smallest}")
    db.execute(
        f"INSERT INTO versions ({COLUMNS}, published_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            version.number,
            version.step,
            version.parent,
            version.digest,
            _told(db, version.path),
            version.manifest,
            db.wall_clock(),
        ),
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


def _told(db: Database, path: Path) -> str:
    """A version's place as it is stored: seen from the ledger's folder, if it lies in there, so that a run can move."""
    folder = db.path.parent.absolute()
    return f"{HERE}{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)


def _version(db: Database, row: tuple[int, int, int | None, str, str, str]) -> Version:
    number, step, parent, digest, told, manifest = row
    path = db.path.parent.absolute() / told if told.startswith(HERE) else Path(told)
    return Version(number=number, step=step, parent=parent, digest=digest, path=path, manifest=manifest)
