import errno
import json
import logging
import multiprocessing
import os
import shutil
import stat
import threading
import warnings
from pathlib import Path

import pytest

from offbeat.cli.train import resolve
from offbeat.config import fixed_keys, load, resolved
from offbeat.config.schema import DEMO
from offbeat.errors import DiskError, OffbeatError, UserError
from offbeat.files import cannot_write
from offbeat.launch.run_folder import RunFolder, check_resumable, newest_run, plain, started_in
from offbeat.ledger.ledger import Ledger
from offbeat.weights.version import Version


def config(tmp_path, *overrides: str):
    return load(None, [f"--run.dir={tmp_path}", *overrides])


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def begin(tmp_path, name: str = "a") -> RunFolder:
    folder = RunFolder.create(config(tmp_path, f"--run.name={name}"))
    folder.metrics({"step": 1, "reward": 0.5})
    with Ledger(folder.ledger) as ledger:
        ledger.record_fixed_keys(fixed_keys(folder.config))
    return folder


def test_a_new_run_writes_its_configuration_and_its_start(tmp_path):
    with RunFolder.create(config(tmp_path, "--batch.group-size=4")) as folder:
        stored = json.loads((folder.path / "config.json").read_text())
        assert stored == resolved(folder.config)
        assert (stored["batch"]["group_size"], stored["run"]["name"]) == (4, folder.path.name)
        assert [event["event"] for event in lines(folder.path / "events.jsonl")] == ["start"]


def test_runs_without_a_name_in_the_same_second_get_folders_of_their_own(tmp_path):
    with RunFolder.create(config(tmp_path)) as one, RunFolder.create(config(tmp_path)) as two:
        assert one.path != two.path


def test_a_name_in_use_is_refused_with_the_way_to_go_on(tmp_path):
    begin(tmp_path).close()
    with pytest.raises(UserError, match=r"a: this run exists; continue it with --resume .*a, or choose another"):
        RunFolder.create(config(tmp_path, "--run.name=a"))


def test_a_run_that_never_began_gives_its_name_back(tmp_path):
    RunFolder.create(config(tmp_path, "--run.name=a")).close()
    with RunFolder.create(config(tmp_path, "--run.name=a", "--batch.group-size=4")) as folder:
        assert (folder.config.batch.group_size, folder.attempt) == (4, 1)


def test_a_start_from_which_nothing_came_is_no_attempt_of_its_own(tmp_path):
    RunFolder.create(config(tmp_path, "--run.name=a")).close()
    with RunFolder.open(tmp_path / "a") as folder:
        assert folder.attempt == 1


def test_a_missing_run_is_refused_with_a_few_of_those_there_are_and_the_number_of_others(tmp_path):
    for number in range(6):
        RunFolder.create(config(tmp_path, f"--run.name=a{number}")).close()
    with pytest.raises(UserError, match=r"there is no such run; .* has a2, a3, a4, a5 and 2 more$"):
        RunFolder.open(tmp_path / "b")


def refuse_to_begin(tmp_path, do) -> None:
    """Begins a run named a, calls `do` with its ledger, and then ends the run by a mistake of its user."""
    with RunFolder.create(config(tmp_path, "--run.name=a")) as folder:
        with Ledger(folder.ledger) as ledger:
            ledger.record_fixed_keys(fixed_keys(folder.config))
            do(ledger)
        raise UserError("no")


def test_a_new_run_that_is_refused_leaves_nothing_unless_it_had_begun(tmp_path):
    with pytest.raises(UserError, match=r"^no$"):
        refuse_to_begin(tmp_path, lambda ledger: None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"^no$"):
        refuse_to_begin(tmp_path, lambda ledger: ledger.publish(Version(0, 0, None, "digest", Path("weights"))))
    with pytest.raises(UserError, match="this run exists"):
        RunFolder.create(config(tmp_path, "--run.name=a"))


def test_an_error_that_is_nobodys_mistake_leaves_the_folder_and_its_logs(tmp_path):
    with pytest.raises(DiskError), RunFolder.create(config(tmp_path, "--run.name=a")):
        raise DiskError("no space")
    RunFolder.open(tmp_path / "a").close()


def test_a_run_killed_before_it_began_gives_its_name_to_a_run_with_other_fixed_keys(tmp_path):
    folder = RunFolder.create(config(tmp_path, "--run.name=a"))
    with Ledger(folder.ledger) as ledger:
        ledger.record_fixed_keys(fixed_keys(folder.config))
    folder.close()
    with RunFolder.create(config(tmp_path, "--run.name=a", "--batch.group-size=4")) as folder:
        assert not folder.ledger.exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="holds no run"):
        RunFolder.create(config(tmp_path, "--run.name=a"))
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["thesis.tex"]


def test_a_resumed_run_keeps_its_rows_and_counts_its_attempts(tmp_path):
    begin(tmp_path).close()
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')  # killed here
    with RunFolder.open(tmp_path / "a") as folder:
        folder.metrics({"step": 2, "reward": 0.6})
    rows = lines(tmp_path / "a" / "metrics.jsonl")
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 2)]


def test_a_free_key_may_change_on_resume_and_the_change_is_an_event(tmp_path):
    begin(tmp_path).close()
    with RunFolder.open(tmp_path / "a", config(tmp_path, "--run.steps=400")) as folder:
        assert (folder.config.run.steps, folder.config.run.name) == (400, "a")
    change = lines(tmp_path / "a" / "events.jsonl")[-1]
    assert (change["event"], change["key"], change["new"]) == ("config_change", "run.steps", 400)
    assert change["old"] == DEMO["run"]["steps"]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["run"]["steps"] == 400


def test_a_fixed_key_may_not(tmp_path):
    begin(tmp_path).close()
    changed = config(tmp_path, "--batch.group-size=16", "--run.seed=1")
    with pytest.raises(UserError, match=r"^run.seed = 1: the run .*a has 0, .*; other fixed keys that differ: 1$"):
        RunFolder.open(tmp_path / "a", changed)
    RunFolder.open(tmp_path / "a").close()  # the refusal has let go of the folder


def contents(folder) -> dict[str, bytes]:
    """Every file of a run; those that SQLite makes for readers come and go."""
    return {
        str(file): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize("key, value", [("max_staleness", 9), ("mode", "overlap")])
def test_a_fixed_key_that_was_changed_by_hand_in_the_stored_configuration_is_refused_by_the_ledger(
    tmp_path, key, value
):
    begin(tmp_path).close()
    file = tmp_path / "a" / "config.json"
    stored = json.loads(file.read_text())
    before, stored["schedule"][key] = stored["schedule"][key], value
    file.write_text(json.dumps(stored))
    left = contents(tmp_path)
    told = rf"^schedule\.{key} = .*ledger\.sqlite was begun with .*fixed.*; set it back in .*a/config\.json, or start"
    with pytest.raises(UserError, match=told):
        RunFolder.open(tmp_path / "a")
    assert contents(tmp_path) == left
    stored["schedule"][key] = before
    file.write_text(json.dumps(stored))
    RunFolder.open(tmp_path / "a").close()


def test_a_run_whose_folder_was_moved_goes_on_and_so_does_one_with_other_free_keys(tmp_path):
    begin(tmp_path).close()
    RunFolder.open(tmp_path / "a", config(tmp_path, "--run.steps=400")).close()
    (tmp_path / "a").rename(tmp_path / "b")
    for _ in range(2):
        with RunFolder.open(tmp_path / "b") as folder:
            assert (folder.config.run.name, folder.config.run.steps) == ("b", 400)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_lost_ledger_is_told_and_not_replaced_by_an_empty_one(tmp_path, is_empty):
    begin(tmp_path).close()
    (tmp_path / "a" / "ledger.sqlite").unlink()
    if is_empty:
        (tmp_path / "a" / "ledger.sqlite").touch()
    left = contents(tmp_path)
    with pytest.raises(UserError, match=r"ledger\.sqlite: is missing or empty; restore it from a backup"):
        RunFolder.open(tmp_path / "a")
    assert contents(tmp_path) == left


def test_a_run_that_never_began_is_begun_by_a_resume(tmp_path):
    RunFolder.create(config(tmp_path, "--run.name=a")).close()
    with RunFolder.open(tmp_path / "a") as folder:
        assert not folder.ledger.exists()
        assert folder.config.run.name == "a"


def test_damaged_pages_of_the_ledger_are_noticed_before_anything_is_written(tmp_path):
    begin(tmp_path).close()
    file = tmp_path / "a" / "ledger.sqlite"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = bytes(4096)
    file.write_bytes(data)
    left = contents(tmp_path)
    with pytest.raises(UserError, match=r"ledger\.sqlite is damaged \(.*\); restore it from a backup, then resume"):
        RunFolder.open(tmp_path / "a")
    assert contents(tmp_path) == left


def test_what_is_no_run_is_refused(tmp_path):
    begin(tmp_path).close()
    with pytest.raises(UserError, match=r"no such run; .* has a$"):
        RunFolder.open(tmp_path / "b")
    with pytest.raises(UserError, match="holds no run"):
        RunFolder.open(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "a" / "config.json").write_text(content)
        with pytest.raises(UserError, match="is damaged"):
            RunFolder.open(tmp_path / "a")


def test_whoever_comes_second_is_refused_and_told_who_is_there(tmp_path):
    with begin(tmp_path), pytest.raises(UserError, match=f"is in use by process {os.getpid()} on"):
        RunFolder.open(tmp_path / "a")
    RunFolder.open(tmp_path / "a").close()


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path):
    with begin(tmp_path) as folder:
        context = multiprocessing.get_context("fork")
        ready, done = context.Event(), context.Event()
        child = context.Process(target=_wait, args=(ready, done))
        child.start()
        assert ready.wait(30)
        with pytest.raises(UserError, match="is in use"):  # the child gave up its copy, not the parent's
            RunFolder.open(folder.path)
    try:
        RunFolder.open(tmp_path / "a").close()  # while the child lives on
    finally:
        done.set()
        child.join(30)


def _wait(ready, done) -> None:
    ready.set()
    done.wait(60)


def test_numbers_that_json_cannot_say_become_null():
    numpy = pytest.importorskip("numpy")
    row = {
        "a": float("nan"),
        "b": float("inf"),
        "c": numpy.float32(0.5),
        "d": numpy.int64(3),
        "e": [1, (2,)],
        "f": None,
    }
    assert plain(row) == {"a": None, "b": None, "c": 0.5, "d": 3, "e": [1, [2]], "f": None}


def test_logs_and_warnings_go_to_the_runs_folder_while_it_is_open(tmp_path):
    with begin(tmp_path) as folder:
        logging.getLogger("offbeat.trainer").info("a thing happened")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("mind the gap", stacklevel=1)
        text = (folder.logs / "offbeat.log").read_text()
    assert "a thing happened" in text
    assert "mind the gap" in text
    logging.getLogger("offbeat.trainer").info("too late")
    assert "too late" not in (tmp_path / "a" / "logs" / "offbeat.log").read_text()


def test_spans_are_timed_and_traced(tmp_path):
    with begin(tmp_path) as folder:
        with folder.trace.span("train", step=1):
            pass
        assert folder.trace.spans_since_last()["train"] >= 0
        folder.metrics({"step": 2})
        assert '"train"' in (folder.path / "trace.json").read_text()


def test_a_trace_is_json_however_its_run_ended(tmp_path):
    with pytest.raises(KeyboardInterrupt), begin(tmp_path) as folder, folder.trace.span("train"):
        raise KeyboardInterrupt
    assert [event["name"] for event in json.loads((folder.path / "trace.json").read_text())][1:] == ["train"]


def test_a_summary_is_replaced_whole(tmp_path):
    with begin(tmp_path) as folder:
        folder.summary({"steps": 1})
        folder.summary({"steps": 2, "reward_last": float("nan")})
        assert json.loads((folder.path / "summary.json").read_text()) == {"steps": 2, "reward_last": None}


def test_a_disk_that_fills_up_is_told_and_the_folder_is_let_go(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs a device that is always full")
    begin(tmp_path).close()
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "a" / "metrics.jsonl").symlink_to("/dev/full")
    told = r"metrics\.jsonl: cannot be written: No space left"
    with pytest.raises(OffbeatError, match=told), RunFolder.open(tmp_path / "a") as folder:
        folder.metrics({"step": 2})
    (tmp_path / "a" / "metrics.jsonl").unlink()
    RunFolder.open(tmp_path / "a").close()


def test_a_run_that_a_full_disk_kept_from_beginning_can_be_begun_again(tmp_path, monkeypatch):
    def full(path):
        raise cannot_write(path, OSError(errno.ENOSPC, "No space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.launch.run_folder._log_to", full)
        with pytest.raises(DiskError):
            RunFolder.create(config(tmp_path, "--run.name=a"))
    RunFolder.open(tmp_path / "a").close()
    RunFolder.create(config(tmp_path, "--run.name=a")).close()


def test_the_newest_run_is_the_one_at_work_last(tmp_path):
    begin(tmp_path, "a").close()
    begin(tmp_path, "b").close()
    assert newest_run(tmp_path).name == "b"
    RunFolder.open(tmp_path / "a").close()
    assert newest_run(tmp_path).name == "a"
    with pytest.raises(UserError, match="holds no run yet"):
        newest_run(tmp_path / "a")


def test_runs_of_one_process_keep_their_logs_apart_and_the_first_to_end_stops_no_other(tmp_path):
    def work(name: str) -> None:
        with begin(tmp_path, name):
            both_open.wait(30)
            logging.getLogger("offbeat.trainer").info("said by %s", name)
            both_said.wait(30)
            if name == "b":
                first.join(30)
                with warnings.catch_warnings():
                    warnings.simplefilter("always")
                    warnings.warn("the other one has ended", stacklevel=1)

    both_open, both_said = threading.Barrier(2), threading.Barrier(2)
    first = threading.Thread(target=work, args=("a",))
    first.start()
    work("b")
    logs = {name: (tmp_path / name / "logs" / "offbeat.log").read_text() for name in "ab"}
    assert ("said by a" in logs["a"], "said by b" in logs["a"]) == (True, False)
    assert ("said by a" in logs["b"], "said by b" in logs["b"]) == (False, True)
    assert "the other one has ended" in logs["b"]


@pytest.mark.parametrize(
    "line", [b'{"event": "sta', b"\xff\xfe\x00", b"null", b'{"time": 3}', b'{"event": "x", "attempt": "2"}']
)
def test_a_garbage_line_among_the_events_is_skipped_with_a_word(tmp_path, capsys, line):
    begin(tmp_path).close()
    with open(tmp_path / "a" / "events.jsonl", "ab") as file:
        file.write(line + b"\n")
    with RunFolder.open(tmp_path / "a") as folder:
        assert folder.attempt == 2
        assert folder.last_event("start")["attempt"] == 1
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {tmp_path / 'a' / 'events.jsonl'}: line 2 is skipped: ")
    assert told.count("\n") == 1


def test_the_latest_event_of_a_kind_is_known_as_soon_as_it_happened(tmp_path):
    with begin(tmp_path) as folder:
        folder.event("checkpoint", step=1)
        folder.event("checkpoint", step=2)
    with RunFolder.open(tmp_path / "a") as folder:
        assert folder.last_event("checkpoint")["step"] == 2
        folder.event("checkpoint", step=3)
        assert folder.last_event("checkpoint")["step"] == 3
        assert folder.last_event("end") is None


@pytest.mark.parametrize("named", ["by its new name", "by nothing", "by the name in its configuration file"])
def test_a_run_that_was_copied_or_moved_goes_on_under_the_name_of_its_folder(tmp_path, named):
    begin(tmp_path).close()
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    name = {"by its new name": ["--run.name=b"], "by nothing": []}.get(named, ["--run.name=a"])
    checked = check_resumable(tmp_path / "elsewhere" / "b", config(tmp_path, *name))
    with RunFolder.open(tmp_path / "elsewhere" / "b", checked) as folder:
        assert folder.config.run.name == "b"
        change = lines(folder.path / "events.jsonl")[-1]
        assert (change["event"], change["key"], change["old"], change["new"]) == ("config_change", "run.name", "a", "b")
    with RunFolder.open(tmp_path / "a") as original:  # which knows nothing of its copy
        assert original.config.run.name == "a"


def test_a_run_is_resumed_from_within_its_folder_under_its_own_name(tmp_path, monkeypatch):
    begin(tmp_path).close()
    monkeypatch.chdir(tmp_path / "a")
    with RunFolder.open(Path()) as folder:
        assert folder.config.run.name == "a"


def test_a_name_that_is_neither_the_folders_nor_the_runs_is_refused(tmp_path):
    begin(tmp_path).close()
    with pytest.raises(UserError, match=r'^run.name = "c": the run .*a has "a", .*fixed'):
        RunFolder.open(tmp_path / "a", config(tmp_path, "--run.name=c"))


def test_a_copy_is_found_by_its_name_among_the_runs(tmp_path):
    begin(tmp_path).close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found, path = resolve(None, [f"--run.dir={tmp_path}", "--run.name=b"], "")
    assert (path, found.run.name) == (tmp_path / "b", "b")


def modes(folder) -> dict[str, int]:
    """What of a folder and all that is in it others may do, by its path."""
    return {str(path): stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.rglob("*"))}


def test_a_runs_folder_and_all_that_is_made_there_is_private(tmp_path):
    parent = tmp_path / "runs"
    with RunFolder.create(config(parent, "--run.name=a")) as folder:
        (folder.path / "weights" / "00000001").mkdir(parents=True)  # as any module makes files
        (folder.path / "weights" / "00000001" / "model.safetensors").write_bytes(b"")
        folder.summary({})
    assert len(modes(folder.path)) >= 9
    assert set(modes(folder.path).values()) == {0}
    assert stat.S_IMODE(parent.stat().st_mode) & 0o055, "what else is beside the run is not our affair"
    (tmp_path / "later").touch()
    assert modes(tmp_path / "later") == {str(tmp_path / "later"): 0o044}, "the process is as it was before"


@pytest.mark.parametrize("access, folder_mode, file_mode", [("group", 0o50, 0o40), ("everyone", 0o55, 0o44)])
def test_a_run_can_be_shared(tmp_path, access, folder_mode, file_mode):
    with RunFolder.create(config(tmp_path, "--run.name=a", f"--run.access={access}")) as folder:
        found = modes(folder.path)
    assert (found[str(folder.path)], found[str(folder.path / "metrics.jsonl")]) == (folder_mode, file_mode)
    assert found[str(folder.path / "config.json")] == file_mode


def test_a_resumed_run_writes_as_privately_as_before_and_leaves_the_folder_to_its_owner(tmp_path):
    begin(tmp_path).close()
    (tmp_path / "a").chmod(0o750)
    with RunFolder.open(tmp_path / "a") as folder:
        (folder.path / "new").touch()
    assert modes(folder.path)[str(folder.path / "new")] == 0
    assert modes(folder.path)[str(folder.path)] == 0o50


def test_relative_paths_of_a_run_count_from_the_folder_that_it_was_started_in(tmp_path, monkeypatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(project)
    RunFolder.create(load(None, ["--run.name=a"])).close()
    monkeypatch.chdir(elsewhere)
    assert started_in(project / "runs" / "a") == project
    RunFolder.open(project / "runs" / "a").close()
    assert started_in(project / "runs" / "a") == project


def test_relative_paths_of_a_project_that_was_copied_count_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    RunFolder.create(load(None, ["--run.name=a"])).close()
    monkeypatch.chdir(tmp_path)
    shutil.copytree("project", "copy")
    assert started_in(tmp_path / "copy" / "runs" / "a") == tmp_path
