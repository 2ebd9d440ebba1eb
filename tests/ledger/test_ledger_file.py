from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from ledger_run import full_step, new_groups, version

from offbeat.errors import UserError
from offbeat.ledger import database
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.tables import SCHEMA


def test_a_ledger_is_durable_by_its_settings(ledger: Ledger):
    def ask(pragma: str):
        return ledger.execute(f"PRAGMA {pragma}").fetchone()[0]

    assert (ask("journal_mode"), ask("synchronous"), ask("foreign_keys")) == ("wal", 2, 1)


def test_what_was_stored_is_there_after_opening_again(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        before = ledger.counts(), ledger.cursor(), ledger.latest_version()
    with Ledger(path) as ledger:
        assert (ledger.counts(), ledger.cursor(), ledger.latest_version()) == before


def test_a_newer_schema_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(UserError, match=rf"written by a newer Offbeat \(schema 99; this one reads {SCHEMA}\)"):
        Ledger(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path: Path, read_only: bool):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, " * 100)
    with pytest.raises(UserError, match="cannot be used as a ledger"):
        Ledger(text, read_only=read_only)
    assert text.read_text() == "not a database, " * 100
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE things (x)")
    with pytest.raises(UserError, match="not a ledger of Offbeat"):
        Ledger(other, read_only=read_only)


def test_reading_a_ledger_neither_makes_nor_changes_one(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(UserError, match="does not exist"):
        Ledger(path, read_only=True)
    assert not path.exists()
    with Ledger(path) as writer, Ledger(path, read_only=True) as reader:
        writer.publish(version(0, 0))
        full_step(writer, 0)
        assert reader.verify().holds
        assert reader.counts() == writer.counts()
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.admit(new_groups(reader, 1))


def test_a_folder_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path):
    with pytest.raises(UserError, match="unable to open"):
        Ledger(tmp_path / "missing" / "ledger.sqlite")


def test_network_file_systems_are_told_by_the_deepest_mount(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\n"
        "server:/export /data nfs4 rw 0 0\n"
        "/dev/vdb /data/local xfs rw 0 0\n"
        "//host/share /my\\040share cifs rw 0 0\n"
        "server:/b /twice nfs rw 0 0\n"
        "/dev/vdc /twice ext4 rw 0 0\n"
    )

    def kind(path: str) -> str | None:
        return database.network_file_system(Path(path), mounts)

    assert kind("/home/run/ledger.sqlite") is None
    assert kind("/data/run/ledger.sqlite") == "nfs4"
    assert kind("/data/local/run/ledger.sqlite") is None
    assert kind("/database/ledger.sqlite") is None
    assert kind("/my share/ledger.sqlite") == "cifs"
    assert kind("/twice/ledger.sqlite") is None
    assert database.network_file_system(Path("/data/x"), tmp_path / "no such file") is None


def test_a_ledger_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database, "network_file_system", lambda path: "nfs4")
    with pytest.raises(UserError, match=r"is on a network file system \(nfs4\)"):
        Ledger(tmp_path / "ledger.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_an_older_schema_is_refused_in_one_line(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    with pytest.raises(UserError, match=rf"written by an older Offbeat \(schema 1; this one reads {SCHEMA}\)"):
        Ledger(path)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_ledger_that_must_exist_is_not_made(tmp_path: Path, is_there: bool):
    path = tmp_path / "ledger.sqlite"
    if is_there:
        path.touch()
    with pytest.raises(UserError, match=r"ledger\.sqlite (is empty|does not exist)"):
        Ledger(path, must_exist=True)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b""] * is_there


def test_what_a_run_began_with_is_recorded_once(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.recorded_fixed_keys() is None
        for bound in (4, 8):
            ledger.record_fixed_keys({"schedule": {"max_staleness": bound}})
        assert ledger.recorded_fixed_keys() == {"schedule": {"max_staleness": 4}}
