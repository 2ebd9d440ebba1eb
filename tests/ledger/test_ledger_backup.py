"""A backup is one moment of the ledger, whole or not there, and a run goes on from a copy of it."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from ledger_life import NUM_STEPS, Disk, live, undisturbed
from ledger_run import answer, claim, data_of, full_step, handed, new_groups, send, version

from offbeat.errors import UserError
from offbeat.ledger import bodies, maintenance
from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome

fsspec = pytest.importorskip("fsspec", reason="needs the extra 'remote'")


@pytest.fixture(autouse=True)
def some_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the bodies are files."""
    monkeypatch.setattr(bodies, "MAX_ROW_BYTES", 190)


@pytest.fixture(params=["folder", "file URL", "memory URL"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    memory = fsspec.filesystem("memory")
    if memory.exists("/backups"):
        memory.rm("/backups", recursive=True)
    targets = {
        "folder": str(tmp_path / "to"),
        "file URL": f"file://{tmp_path}/to",
        "memory URL": "memory://backups/run",
    }
    return targets[request.param]


def restored(target: str, folder: Path) -> Path:
    """Copies a backup back, as a person would."""
    if "://" not in target:
        shutil.copytree(target, folder)
    else:
        files, root = fsspec.core.url_to_fs(target)
        for path in files.find(root):
            place = folder / path[len(root) :].lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(files.cat_file(path))
    return folder / "ledger.sqlite"


def test_a_restored_backup_verifies_and_the_run_goes_on_from_it(ledger: Ledger, target: str, tmp_path: Path):
    batches = [full_step(ledger, step, size=3) for step in range(2)]
    ledger.admit(new_groups(ledger, 1, require_version=2))
    task = ledger.lease("w", 1, 2)[0]
    partial = answer(task, [2], end=None)
    assert send(ledger, partial) is Outcome.PARTIAL
    before = ledger.counts()
    made = ledger.backup(target)
    assert made.num_blobs > 0
    with Ledger(restored(target, tmp_path / "back"), LedgerTerms(min_group=2)) as back:
        assert back.verify().violations == ()
        assert back.counts() == before
        resumed = back.reconcile(1, None)
        back.publish(version(back.next_version_number(), 1, resumed.parent))
        again = claim(back, 1, 2, 0)
        assert again is not None
        assert data_of(again) == data_of(batches[1])


def test_a_backup_of_a_killed_run_ends_like_one_that_nobody_disturbed(tmp_path: Path):
    """Taken in the middle, carried on elsewhere: what was trained in the end is the same."""
    expected = undisturbed(tmp_path / "undisturbed.sqlite")
    how = {"save_every": 1, "saves_before_commit": True, "capacity": 4, "order": 2}
    disk = Disk(tmp_path / "ledger.sqlite")
    life = live(disk, **how)
    for _, _ in zip(range(70), life, strict=False):
        pass
    Ledger(disk.path, read_only=True).backup(tmp_path / "to")
    life.close()
    elsewhere = Disk(restored(str(tmp_path / "to"), tmp_path / "back"), disk.checkpoint, dict(disk.trained))
    assert 0 < elsewhere.checkpoint[0] < NUM_STEPS
    for _ in live(elsewhere, **how):
        pass
    assert elsewhere.trained == expected


def test_a_second_backup_copies_only_new_files_and_drops_what_nobody_names(ledger: Ledger, target: str, tmp_path: Path):
    full_step(ledger, 0, size=8)
    first = ledger.backup(target)
    assert first.num_blobs > 0
    assert ledger.backup(target).num_blobs == 0
    full_step(ledger, 1, size=8)
    full_step(ledger, 2, size=8)
    ledger.prune(1)
    second = ledger.backup(target)
    assert second.num_blobs > 0
    path = restored(target, tmp_path / "back")
    with Ledger(path, LedgerTerms(min_group=2)) as back:
        assert back.verify().violations == ()
        assert set(back.blobs.all()) == set(ledger.blobs.all())


def test_writers_do_not_wait_for_a_backup_and_it_holds_the_moment_it_began(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full_step(ledger, 0)
    monkeypatch.setattr(maintenance, "PAGES", 1)
    before = ledger.counts()
    steps = iter(range(1, 4))

    def meanwhile(status: int, remaining: int, total: int) -> None:
        if (step := next(steps, None)) is not None:
            assert remaining > 0
            full_step(ledger, step)

    maintenance._snapshot(tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite", meanwhile)
    assert ledger.admission_state().step == 4
    with Ledger(tmp_path / "copy.sqlite", read_only=True) as copy:
        assert copy.counts() == before


def test_backups_taken_all_along_a_run_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintenance, "MAX_ATTEMPTS", 1000)  # no run prunes as often as this one, and threads wait long
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        is_over = threading.Event()

        def run() -> None:
            try:
                for step in range(1, 40):
                    full_step(ledger, step, size=4)
                    ledger.prune(step)
            finally:
                is_over.set()

        running = threading.Thread(target=run)
        running.start()
        num_backups = 0
        while not is_over.is_set() or num_backups == 0:
            Ledger(tmp_path / "ledger.sqlite", read_only=True).backup(tmp_path / "to")
            num_backups += 1
            with Ledger(tmp_path / "to" / "ledger.sqlite", read_only=True) as copy:
                assert copy.verify().violations == ()
        running.join()
        assert ledger.admission_state().step == 40


def test_a_backup_that_is_interrupted_leaves_the_one_before(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    full_step(ledger, 0)
    ledger.backup(tmp_path / "to")
    before = ledger.counts()
    full_step(ledger, 1, size=4)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for what in ("put_blob", "take"):
        with monkeypatch.context() as broken:
            broken.setattr(maintenance.Folder, what, no_space)
            with pytest.raises(OSError, match="No space"):
                ledger.backup(tmp_path / "to")
        with Ledger(tmp_path / "to" / "ledger.sqlite", read_only=True) as copy:
            assert copy.verify().violations == ()
            assert copy.counts() == before
    ledger.backup(tmp_path / "to")
    with Ledger(tmp_path / "to" / "ledger.sqlite", read_only=True) as copy:
        assert copy.counts() == ledger.counts()
    assert not list(tmp_path.glob("backup-*"))


def test_a_ledger_of_several_mebibytes_is_copied_whole(ledger: Ledger, target: str, tmp_path: Path):
    full_step(ledger, 0, size=3)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("CREATE TABLE ballast (body BLOB)")
        file.execute("INSERT INTO ballast VALUES (randomblob(3000000))")
        (body,) = file.execute("SELECT body FROM ballast").fetchone()
    ledger.backup(target)
    with sqlite3.connect(restored(target, tmp_path / "back")) as copy:
        assert copy.execute("SELECT body FROM ballast").fetchone() == (body,)


def test_a_file_that_is_gone_for_good_is_named(ledger: Ledger, tmp_path: Path):
    full_step(ledger, 0, size=8)
    digest = next(iter(ledger.blobs.all()))
    body = ledger.blobs.read(digest)
    ledger.blobs.path(digest).unlink()
    with pytest.raises(LedgerError, match=f"{digest.hex()} cannot be read"):
        ledger.backup(tmp_path / "to")
    assert not (tmp_path / "to" / "ledger.sqlite").exists()
    ledger.blobs.write(digest, body)


def test_a_folder_where_a_run_goes_on_is_no_target(ledger: Ledger, tmp_path: Path):
    full_step(ledger, 0)
    with pytest.raises(UserError, match="a ledger in use"):
        ledger.backup(tmp_path)


def test_a_target_that_nobody_knows_is_a_mistake_of_the_user(ledger: Ledger):
    with pytest.raises(UserError, match="nowhere://x cannot be used"):
        ledger.backup("nowhere://x")


def test_the_copy_is_one_plain_file(ledger: Ledger, tmp_path: Path):
    ledger.admit(new_groups(ledger, 1, size=1))
    ledger.submit([handed(answer(ledger.lease("w", 1, 0)[0], [0]))])
    ledger.backup(tmp_path / "to")
    assert {path.name for path in (tmp_path / "to").iterdir()} <= {"ledger.sqlite", "blobs"}
    with sqlite3.connect(tmp_path / "to" / "ledger.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
