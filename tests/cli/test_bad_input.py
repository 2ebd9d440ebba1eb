"""What users and machines get wrong, through the real command: one line, an exit status, nothing lost, nobody left.

Each test runs `python -m offbeat` as a process of its own. Also through the real command, but elsewhere:

- a full disk: `faults/test_disk_full.py`;
- runs that are killed outright: `faults/test_exact_resume.py`;
- a second process on a run that another program holds: `cli/test_command_line.py`, which has many more wrong words.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest
from real_command import (
    ENDLESS,
    QUICK,
    Command,
    checkpoints,
    command_in,
    ended,
    events,
    get_on,
    line_after_warnings,
    only_line,
    rows,
    wait_until,
)
from zygote import no_zygote

from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import TINY_FOLDER
from offbeat.weights.version import Version


@pytest.fixture
def offbeat(tmp_path):
    with command_in(tmp_path) as command:
        yield command


@pytest.mark.parametrize(
    "text, told",
    [
        ("[batch]\ngroup_sise = 16\n", "run.toml:2: batch.group_sise = 16: unknown key; did you mean group_size?"),
        (
            "[optimizer]\nschedule = 'cosin'\n",
            'run.toml:2: optimizer.schedule = "cosin": must be "constant", "linear" or "cosine"; '
            'did you mean "cosine"?',
        ),
        (
            "[batch]\ngroup_size = '16'\n",
            'run.toml:2: batch.group_size = "16": wants a whole number, not text; write it without quotes',
        ),
        ("[loss]\nclip_low = 1.5\n", "run.toml:2: loss.clip_low = 1.5: must be more than 0 and less than 1"),
        (
            "[batch]\ngroups_per_step = 8\nupdates_per_step = 3\n",
            "run.toml:3: batch.updates_per_step = 3: must divide batch.groups_per_step = 8, because each update trains "
            "whole groups",
        ),
    ],
    ids=["unknown key", "misspelt value", "wrong type", "out of range", "batch arithmetic"],
)
def test_a_wrong_configuration_is_told_by_its_line(offbeat, text, told):
    (offbeat.folder / "run.toml").write_text(text)
    assert offbeat.fails("train", "run.toml") == told
    assert not (offbeat.folder / "runs").exists()


def test_a_model_that_is_not_there_is_told(offbeat):
    folder = offbeat.folder / "bare"
    folder.mkdir()
    shutil.copy(TINY_FOLDER / "config.json", folder)
    for command in ("train", "eval"):
        told = offbeat.fails(command, *(["--model.path=nowhere"] if command == "train" else ["nowhere"]))
        assert told.startswith("model.path = 'nowhere': no such folder; give the folder of a Hugging Face model, its ")
    (folder.parent / "smol").mkdir()
    shutil.copytree(TINY_FOLDER, folder.parent / "smol" / "smollm2")
    told = "model.path = 'smol/smolm2/': no such folder; did you mean 'smol/smollm2'?"
    assert offbeat.fails("train", "--model.path=smol/smolm2/") == told
    assert offbeat.fails("eval", "bare").startswith("model.path = 'bare' has no *.safetensors; save the model with")


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "task.path = 'data.jsonl': it has no row; give at least one, with a prompt"),
        ('{"prompt": "1+1="}\n\n{"prompt": "1+', "data.jsonl:3: this line is not JSON: Input data was truncated"),
        (
            '{"prompt": "1+1="}\n{"promt": "2+1="}\n',
            "data.jsonl:2: the row has no column 'prompt'; did you mean 'promt'?",
        ),
    ],
    ids=["empty", "malformed", "no column"],
)
def test_a_wrong_data_file_is_told_by_its_line(offbeat, text, told):
    (offbeat.folder / "data.jsonl").write_text(text)
    words = ("--task.source=file", "--task.path=data.jsonl", "--task.reward=exact")
    assert offbeat.fails("train", *QUICK, *words) == told
    assert not (offbeat.folder / "runs" / "a").exists()


@pytest.mark.parametrize(
    "function, told",
    [
        ("rasing", r"task\.reward = 'rewards\.py:rasing': .* has no function 'rasing'; did you mean 'raising'\?"),
        (
            "raising",
            r"reward .*: its trial failed: raised: ValueError: no egg, .* \(rewards\.py:6\); see (.*)",
        ),
        (
            "hanging",
            r"reward .*: its trial failed: timeout: no reward within 1 s \(reward\.timeout_s\); see (.*)",
        ),
        (
            "nan",
            r"reward .*: its trial failed: the reward returned nan; .* number.*",
        ),
        ("text", r"reward .*: its trial failed: the reward returned 'good', a str; .*"),
    ],
    ids=["missing", "raising", "hanging", "NaN", "text"],
)
def test_a_reward_that_cannot_work_is_told_before_training(offbeat, function, told):
    limit = ("--reward.timeout-s=1",) if function == "hanging" else ()
    found = re.fullmatch(told, offbeat.fails("train", *QUICK, f"--task.reward=rewards.py:{function}", *limit))
    assert found
    for log in found.groups():
        assert "rewards.py:" in (offbeat.folder / log).read_text()
        assert ("Traceback" in (offbeat.folder / log).read_text()) == (function == "raising")
        Path(log).unlink()  # it is outside the run's folder, which is gone
    assert not (offbeat.folder / "runs" / "a").exists()


def refuses_to_begin(offbeat: Command, *words: str) -> str:
    told = offbeat.fails("train", *QUICK, *words)
    assert not (offbeat.folder / "runs" / "a").exists()
    return told


def test_a_model_without_a_tokenizer_is_told(offbeat):
    shutil.copytree(TINY_FOLDER, offbeat.folder / "mute", ignore=shutil.ignore_patterns("tokenizer.json"))
    told = "model.path = 'mute' has no tokenizer (tokenizer.json); copy the model's tokenizer files there, or name"
    assert refuses_to_begin(offbeat, "--model.path=mute").startswith(told)


def test_chat_messages_without_a_chat_template_are_told(offbeat):
    (offbeat.folder / "chat.jsonl").write_text('{"m": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    words = ("--task.source=file", "--task.path=chat.jsonl", "--task.messages=m", "--task.reward=exact")
    told = "chat.jsonl:1: chat messages need a chat template and the tokenizer has none; set model.chat_template"
    assert refuses_to_begin(offbeat, *words) == told


def test_a_prompt_that_is_too_long_is_told(offbeat):
    told = (
        r"arithmetic, problem 0: its prompt has \d+ tokens, over rollout\.max_prompt_tokens = 2; 64 of 64 prompts of a "
    )
    told += 'sample are too long; raise this limit to 9 or more, or set rollout.long_prompts = "skip" or "cut"'
    assert re.fullmatch(told, refuses_to_begin(offbeat, "--rollout.max-prompt-tokens=2"))


def test_a_model_whose_window_is_too_small_is_told(offbeat):
    told = "rollout.max_prompt_tokens + rollout.max_new_tokens = 600 + 8: offbeat-tiny has a window of 512 tokens; "
    assert refuses_to_begin(offbeat, "--rollout.max-prompt-tokens=600") == told + "lower one of them"


@pytest.mark.full
def test_rewards_that_fail_now_and_then_are_left_out_counted_and_never_zero(offbeat):
    (offbeat.folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    status, out, errors = offbeat(
        *("train", *QUICK, "--batch.groups-per-step=4", "--batch.group-size=4", "--rollout.slots=16", "--run.steps=5"),
        *("--task.source=file", "--task.path=data.jsonl", "--task.reward=rewards.py:now_and_then"),
        *("--reward.timeout-s=4", "--eval.every=1"),  # of one row nothing can be held out: then there is no evaluation
    )
    assert (status, out) == (0, "")
    few_rows, failed, *advice = errors.splitlines()
    assert few_rows.startswith("warning: task data has only 1 row to train on")
    assert re.fullmatch(
        r"warning: step 1: \d samples failed and are not trained on, and .*; see runs/a/logs", failed
    ), errors
    earned = re.compile(r"that were scored earned 1 and \d+ failed, so there is nothing to learn")
    assert all(earned.search(text) for text in advice), errors
    run = offbeat.folder / "runs" / "a"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"]
    assert summary["failures"] == {"reward": 5}
    assert summary["trajectories"]["trained"] + summary["trajectories"]["dropped"] == 80
    assert [row["reward"] for row in rows(run / "metrics.jsonl")] == [1.0] * 5
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        errors = [error for (error,) in ledger.execute("SELECT error FROM rewards WHERE error IS NOT NULL")]
        assert set(ledger.execute("SELECT value FROM rewards WHERE error IS NULL")) == {(1.0,)}
    assert sorted(error.partition(":")[0] for error in errors) == ["crash", "raised", "timeout", "value", "value"]
    log = (run / "logs" / "rewards.log").read_text()
    assert all(error in log for error in errors)
    assert "Traceback" in log
    assert 'raise ValueError("no egg' in log
    assert "everything holds" in offbeat.succeeds("ledger", "verify", "runs/a")


@pytest.mark.full
def test_a_run_whose_rewards_fail_too_often_stops_and_goes_on_once_they_are_mended_until_its_time_is_up(offbeat):
    run = offbeat.folder / "runs" / "a"
    process = offbeat.start("train", *QUICK, ENDLESS, "--task.reward=rewards.py:away")
    get_on(run, process)
    (offbeat.folder / "away").touch()
    status, _, errors = ended(process)
    assert status == 1
    told = r"\d+ of the latest 64 rewards failed \(\d+%; reward\.max_failure_share = 0\.2\), "
    told += r"\d+ of them with the reason: raised: "
    told += r"ConnectionError: the judge is away \(rewards\.py:\d+\); correct the cause "
    told += r"\(see runs/a/logs/rewards\.log\), then .*"
    assert re.fullmatch(told, line_after_warnings(errors)), errors
    assert "the judge is away" in events(run, "error")[0]["error"]
    steps = len(rows(run / "metrics.jsonl"))
    assert checkpoints(run) == [steps]  # no trained step is lost

    (offbeat.folder / "away").unlink()
    told = offbeat.fails("train", "--resume", "runs/a", "--batch.group-size=4")
    assert told.startswith("batch.group_size = 4: the run runs/a has 2, and this key is fixed for the life of a run;")
    changed = ("--optimizer.lr=2e-5", "--run.max-hours=0.0003", "--rollout.max-prompt-tokens=80")
    status, _, errors = offbeat("train", "--resume", "runs/a", *changed)
    assert status == 0
    assert all(line.startswith("warning: ") for line in errors.splitlines()), errors  # this reward teaches nothing
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["stopped_by"]) == (False, "run.max_hours = 0.0003")
    assert checkpoints(run)[-1] == summary["steps"] == len(rows(run / "metrics.jsonl")) > steps
    keys = [event["key"] for event in events(run, "config_change")]
    assert sorted(keys) == ["optimizer.lr", "rollout.max_prompt_tokens", "run.max_hours"]
    (resumed,) = events(run, "resume")
    assert (resumed["step"], resumed["abandoned"]) == (steps, [])
    assert "everything holds" in offbeat.succeeds("ledger", "verify", "runs/a")


@pytest.mark.full
def test_a_run_survives_its_helpers_and_ends_cleanly_by_sigterm_or_ctrl_c(offbeat):
    """One run in three attempts; none of them loses a step."""
    run = offbeat.folder / "runs" / "a"

    def stop_by(number: signal.Signals, process: subprocess.Popen[str]) -> None:
        process.send_signal(number)
        status, out, errors = ended(process)
        assert (status, out) == (128 + number, "")
        (stop, end), steps = (events(run, kind)[-1] for kind in ("stop", "end")), len(rows(run / "metrics.jsonl"))
        assert (stop["why"], end["finished"], end["step"]) == (number.name, False, steps)
        assert checkpoints(run)[-1] == steps
        told = f"stopped by {number.name} after step {steps}, with a checkpoint; continue with offbeat train --resume "
        assert line_after_warnings(errors) == told + "runs/a"

    process = offbeat.start("train", *QUICK, ENDLESS)
    get_on(run, process)
    told = offbeat.fails("train", "--resume", "runs/a")
    assert re.fullmatch(
        f"runs/a is in use by process {process.pid} on .*; stop that process or wait until it ends", told
    )
    helpers = [pid for pid, name in offbeat.processes().items() if "reward" in name]
    assert len(helpers) == 2  # a reward process and the guard
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    get_on(run, process)
    stop_by(signal.SIGTERM, process)

    process = offbeat.start("train", "--resume", "runs/a")
    get_on(run, process)
    stop_by(signal.SIGINT, process)

    steps = len(rows(run / "metrics.jsonl"))
    offbeat.succeeds("train", "--resume", "runs/a", f"--run.steps={steps + 1}")
    assert json.loads((run / "summary.json").read_text())["finished"]
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == list(range(1, steps + 2))
    assert all(event["abandoned"] == event["undone_steps"] == [] for event in events(run, "resume"))
    assert "everything holds" in offbeat.succeeds("ledger", "verify", "runs/a")


def test_ctrl_c_while_torch_is_imported_ends_a_run_at_once_and_leaves_its_name_free(offbeat):
    run = offbeat.folder / "runs" / "a"
    with no_zygote():
        process = offbeat.start("train", *QUICK)
    wait_until(lambda: "rewards.child" in "".join(offbeat.processes().values()), "the reward process", process)
    process.send_signal(signal.SIGINT)
    status, out, errors = ended(process)
    assert (status, out, only_line(errors)) == (130, "", "interrupted")
    assert not run.exists()


@pytest.mark.full
def test_an_export_that_cannot_be_is_told(offbeat):
    run, taken = offbeat.folder / "run", offbeat.folder / "taken"
    taken.mkdir()
    (taken / "thesis.tex").touch()
    assert offbeat.fails("export", "run", "out") == "runs/run: there is no such run"
    assert offbeat.fails("export", "taken", "out") == "taken: holds no run (it has no config.json); give a run's folder"
    run.mkdir()
    (run / "config.json").write_text("{}")
    assert offbeat.fails("export", "run", "out") == "run: has published no weights yet; train at least one step first"
    told = "taken: exists already and is not an empty folder; name a new folder or remove it first"
    assert offbeat.fails("export", "run", "taken") == told
    assert [file.name for file in taken.iterdir()] == ["thesis.tex"]


@pytest.mark.full
def test_a_damaged_ledger_does_not_hold_and_what_is_none_is_told(offbeat):
    assert offbeat.fails("ledger", "verify", ".") == ". holds no ledger; give the folder of a run, such as runs/NAME"
    file = offbeat.folder / "ledger.sqlite"
    with Ledger(file) as ledger:
        ledger.publish(Version(0, 0, None, "digest", Path("weights")))
    whole = file.read_bytes()
    assert "everything holds" in offbeat.succeeds("ledger", "verify", ".")
    assert "step 1, from version 0" in offbeat.succeeds("ledger", "show", ".")
    assert json.loads(offbeat.succeeds("ledger", "show", ".", "--json"))["version"] == 0
    assert offbeat.fails("ledger", "verify", ".", "--json") == (
        "--json goes with offbeat ledger show, not with offbeat ledger verify"
    )

    file.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    status, out, errors = offbeat("ledger", "verify", ".")
    assert (status, errors) == (1, "")
    assert "the file is damaged" in out

    file.write_bytes(b"\xff" * 100 + whole[100:])
    told = "ledger.sqlite cannot be used as a ledger: file is not a database; restore the file from a backup"
    assert offbeat.fails("ledger", "verify", ".") == told
