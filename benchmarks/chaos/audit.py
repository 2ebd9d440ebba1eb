"""Audits a run's ledger after faults: nothing acknowledged is lost, nothing was trained twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.ledger.ledger import Ledger


@dataclass(frozen=True)
class Audit:
    lost: tuple[str, ...]
    """Acknowledged submissions that the ledger lacks or has with other bytes; numbers of groups that were skipped."""
    doubled: tuple[str, ...]
    """Tasks, trajectories, steps and groups that were trained more than once."""
    violations: tuple[str, ...]
    """Violations found by the ledger's own verification."""
    max_staleness: int
    num_trained: int
    num_partials: int
    """Unfinished trajectories that were handed back."""


def audit(run: Path, acknowledged: Mapping[tuple[int, int], bytes]) -> Audit:
    """Audits the ledger of a run. `acknowledged` holds digests of submissions, by task and fence."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        report = ledger.verify()
    db = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        held = {(task, fence): digest for task, fence, digest in db.execute(HELD)}
        lost = [
            f"task {task}, fence {fence}" for (task, fence), d in acknowledged.items() if held.get((task, fence)) != d
        ]
        drawn = {ordinal for (ordinal,) in db.execute("SELECT ordinal FROM groups WHERE purpose = 'train'")}
        lost += [f"group {ordinal}" for ordinal in range(len(drawn)) if ordinal not in drawn]
        doubled = [f"{what} {number}" for what, query in TWICE.items() for (number,) in db.execute(query)]
        (num_trained,) = db.execute("SELECT COUNT(*) FROM batches WHERE state = 'trained'").fetchone()
        (num_partials,) = db.execute("SELECT COUNT(*) FROM partials").fetchone()
    finally:
        db.close()
    oldest = report.counts.max_staleness_trained or 0
    return Audit(tuple(lost), tuple(doubled), report.violations, oldest, int(num_trained), int(num_partials))


HELD = "SELECT task, fence, digest FROM trajectories UNION SELECT task, fence, digest FROM partials"
TWICE = {
    "task": "SELECT task FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.state = 'trained' "
    "GROUP BY task HAVING COUNT(*) > 1",
    "trajectory of task": "SELECT task FROM trajectories GROUP BY task, trajectory_index HAVING COUNT(*) > 1",
    "step": "SELECT step FROM batches WHERE state = 'trained' GROUP BY step HAVING COUNT(*) > 1",
    "group": "SELECT ordinal FROM groups WHERE state = 'trained' AND purpose = 'train' "
    "GROUP BY ordinal HAVING COUNT(*) > 1",
}
