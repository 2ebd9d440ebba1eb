"""Ledgers of an older schema: upgraded in one transaction, with a copy of the old file kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from old_run_folders import SCHEMA as OLD_SCHEMA
from old_run_folders import unpack

from offbeat.errors import UserError
from offbeat.ledger import migrations
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.migrations import is_old, upgrade
from offbeat.ledger.tables import SCHEMA


@pytest.fixture(params=["alone", "swarm"])
def old(request, tmp_path) -> Path:
    return unpack(tmp_path) / "runs" / request.param / "ledger.sqlite"


def rows(path: Path, query: str) -> list[tuple]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def shape(path: Path) -> dict[str, list[tuple]]:
    """Columns of every table, and of every index."""
    names = rows(path, "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
    return {name: rows(path, f"PRAGMA {kind}_xinfo({name})") for kind, name in names}


def test_an_upgraded_ledger_has_the_tables_of_a_new_one_and_holds_together(old, tmp_path):
    kept = [rows(old, f"SELECT COUNT(*) FROM {table}") for table in ("tasks", "segments", "rewards", "partials")]
    assert is_old(old)
    upgrade(old)
    assert not is_old(old)
    with Ledger(tmp_path / "new.sqlite"):
        pass
    assert shape(old) == shape(tmp_path / "new.sqlite")
    assert kept == [
        rows(old, f"SELECT COUNT(*) FROM {table}") for table in ("tasks", "segments", "rewards", "partials")
    ]
    with Ledger(old, read_only=True) as ledger:
        assert ledger.verify().violations == ()


def test_the_old_file_is_kept_beside_the_new_one(old):
    upgrade(old)
    copy = old.with_name(f"ledger.sqlite.before-schema-{SCHEMA}")
    assert rows(copy, "SELECT value FROM meta WHERE key = 'schema'") == [(str(OLD_SCHEMA),)]
    assert rows(copy, "SELECT COUNT(*) FROM tasks") == rows(old, "SELECT COUNT(*) FROM tasks")
    before = copy.stat().st_mtime_ns
    upgrade(old)
    assert copy.stat().st_mtime_ns == before, "an upgraded ledger is upgraded once"


def test_the_copy_of_the_old_file_is_durable_before_the_upgrade(old, monkeypatch):
    copy, synced = old.with_name(f"ledger.sqlite.before-schema-{SCHEMA}"), []

    def sync_folder(folder: Path) -> None:
        synced.append((folder, copy.is_file(), rows(old, "SELECT value FROM meta WHERE key = 'schema'")))

    monkeypatch.setattr(migrations, "fsync_folder", sync_folder)
    upgrade(old)
    assert synced == [(old.parent, True, [(str(OLD_SCHEMA),)])]


def test_failed_attempts_that_were_only_counted_become_rows(old):
    connection = sqlite3.connect(old)
    connection.execute("UPDATE tasks SET num_failures = 2, fence = fence + 5, failed_fence = fence + 5 WHERE id = 1")
    connection.commit()
    connection.close()
    upgrade(old)
    found = rows(old, "SELECT fence, worker, forgiven FROM failures WHERE task = 1 ORDER BY fence")
    (fence,) = rows(old, "SELECT failed_fence FROM tasks WHERE id = 1")[0]
    assert found == [(fence - 1, "unknown", 0), (fence, "unknown", 0)]


def test_an_upgrade_that_breaks_leaves_the_old_ledger(old, monkeypatch):
    broken = {**migrations.MIGRATIONS, SCHEMA - 1: migrations.TO_SCHEMA_7 + "INSERT INTO nowhere VALUES (1);"}
    monkeypatch.setattr(migrations, "MIGRATIONS", broken)
    with pytest.raises(UserError, match=r"cannot be upgraded to schema \d+: no such table: nowhere; the file was not"):
        upgrade(old)
    assert rows(old, "SELECT value FROM meta WHERE key = 'schema'") == [(str(OLD_SCHEMA),)]
    monkeypatch.undo()
    upgrade(old)
    with Ledger(old, read_only=True) as ledger:
        assert ledger.verify().violations == ()


@pytest.mark.parametrize("read_only", [True, False])
def test_whoever_opens_an_old_ledger_without_its_run_is_told_to_resume(old, read_only):
    with pytest.raises(
        UserError, match=r"older Offbeat \(schema 5; this one reads \d+\); resume the run once to upgrade"
    ):
        Ledger(old, read_only=read_only)
    assert is_old(old)


def test_there_is_nothing_to_upgrade_in_no_ledger(tmp_path):
    assert not is_old(tmp_path / "ledger.sqlite")
    upgrade(tmp_path / "ledger.sqlite")
    assert not (tmp_path / "ledger.sqlite").exists()
