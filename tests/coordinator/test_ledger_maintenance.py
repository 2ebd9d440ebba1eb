"""After a checkpoint the ledger is pruned and copied, and a copy that fails ends nothing."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.coordinator.maintenance import LedgerMaintenance, MaintenanceSettings
from offbeat.errors import UserError


class Ledger:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def prune(self, step: int, keep: int) -> SimpleNamespace:
        self.calls.append(("prune", step, keep))
        return SimpleNamespace(num_bodies=3, num_bytes=300)

    def sweep(self) -> int:
        self.calls.append(("sweep",))
        return 0

    def backup(self, target: str) -> SimpleNamespace:
        self.calls.append(("backup", target))
        if target == "nowhere://":
            raise UserError("nowhere: cannot be reached")
        return SimpleNamespace(num_bytes=10, num_blobs=0)


def after_checkpoint(settings: MaintenanceSettings) -> tuple[list[tuple], list[str]]:
    ledger, told = Ledger(), []

    async def call(function, *args):
        return function(*args)

    async def scenario() -> None:
        await LedgerMaintenance(ledger, settings, call, lambda row: told.append(row["event"])).after_checkpoint(7)

    asyncio.run(scenario())
    return ledger.calls, told


def test_nothing_is_forgotten_unless_someone_asks_for_it():
    assert after_checkpoint(MaintenanceSettings()) == ([("sweep",)], [])


def test_bodies_go_before_the_copy_is_made():
    assert after_checkpoint(MaintenanceSettings(2, "there")) == (
        [("prune", 7, 2), ("backup", "there")],
        ["prune", "backup"],
    )


def test_a_copy_that_cannot_be_made_is_told_and_ends_nothing():
    assert after_checkpoint(MaintenanceSettings(backup="nowhere://"))[1] == ["backup_failed"]


@pytest.mark.full
def test_a_run_with_both_ends_with_a_pruned_ledger_and_a_copy_that_can_be_opened(tmp_path: Path):
    from offbeat import train
    from offbeat.ledger.ledger import Ledger as RealLedger

    run = {"run": {"name": "kept", "dir": str(tmp_path / "runs"), "steps": 4}, "log": {"console": "quiet"}}
    small = {"batch": {"groups_per_step": 2, "group_size": 2}, "eval": {"every": 0}, "checkpoint": {"every": 2}}
    train({**run, **small, "ledger": {"keep_bodies": 0, "backup": str(tmp_path / "copy")}})
    with RealLedger(tmp_path / "runs" / "kept" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        num_pruned = ledger.execute("SELECT COUNT(*) FROM trajectories WHERE pruned = 1").fetchone()[0]
        assert num_pruned > 0
    with RealLedger(tmp_path / "copy" / "ledger.sqlite", read_only=True) as copy:
        assert copy.verify().violations == ()
        assert copy.latest_version().step in (2, 4)


def test_a_copy_is_made_beside_the_event_loop(monkeypatch):
    """A copy of gigabytes would keep every worker waiting."""
    threads: list[int] = []
    backup = Ledger.backup

    def watched(self: Ledger, target: str) -> SimpleNamespace:
        threads.append(threading.get_ident())
        return backup(self, target)

    monkeypatch.setattr(Ledger, "backup", watched)
    after_checkpoint(MaintenanceSettings(backup="copy"))
    assert threads
    assert threading.get_ident() not in threads
