"""`offbeat show` lets a person read what a run generated, and a program take it over."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ledger_run import claim, eval_groups, full_step, handed, new_groups, score_all, version, work

from offbeat.cli.main import main
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Scored
from offbeat.model.loading import load_tokenizer
from offbeat.trajectory import End, Reward, Segment, Task, Trajectory

PARTS = ("Twelve", " and a half")


def said(task: Task, *parts: str) -> Trajectory:
    """An answer in so many words, each part of its own version."""
    tokenizer = load_tokenizer("offbeat-tiny")
    trajectory = task.new_trajectory()
    for number, text in enumerate(parts):
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
        logprobs = -np.linspace(0.1, 0.5, len(tokens))
        trajectory.append(
            Segment(trajectory.num_tokens, tokens, logprobs=logprobs, version=number, kv_version=number, worker="w1")
        )
    trajectory.finish(End.LENGTH)
    return trajectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, the second of one group that crossed a version; one member of it could not be judged."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2, max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        (group,) = new_groups(ledger, 1, size=3, require_version=None)
        ledger.admit([long_enough(group)])
        tasks = ledger.lease("w1", 3, 0)
        ledger.submit([handed(said(task, *PARTS), "w1") for task in tasks])
        score_all(ledger, failing=[tasks[2].id])
        assert claim(ledger, 1, 1, 1, in_order=False) is not None
        ledger.commit(1, version(2, 2, 1), audited=[tasks[1].id])
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step, and the evaluation after it."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2, max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        ledger.admit(eval_groups(2, require_version=1))
        work(ledger, 1)
        score_all(ledger)
    return folder


def long_enough(group, text: str = "".join(PARTS)):
    from dataclasses import replace

    import msgspec

    num_tokens = len(load_tokenizer("offbeat-tiny").encode(text, add_special_tokens=False))
    return replace(group, sampling=msgspec.structs.replace(group.sampling, max_new_tokens=num_tokens))


def show(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", str(run), *words]) == 0
    return capsys.readouterr().out


def test_the_list_has_a_line_for_each_trajectory(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    *lines, hint = show(run, capsys).splitlines()
    assert hint == f"offbeat show {run} ID shows one answer in full, with its history"
    assert lines[0].split()[:6] == ["task", "group", "for", "state", "step", "reward"]
    assert [int(line.split()[0]) for line in lines[1:]] == [7, 6, 5, 4, 3, 2, 1]
    cells = lines[1].split()
    assert cells[2:6] == ["train", "failed", "2", "failed"]
    assert "0-1" in cells
    assert lines[1].endswith("".join(PARTS))
    assert len(show(run, capsys, "--last", "2").splitlines()) == 4
    assert len(show(run, capsys, "--step", "2").splitlines()) == 5
    assert show(run, capsys, "--step", "9") == "no training answers at step 9\n"


def test_failed_answers_are_listed_with_the_reason(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    head, line, _ = show(run, capsys, "--failed").splitlines()
    assert line.split()[0] == "7"
    assert line[head.index("why it failed") :].startswith("raised")
    assert [row["task"] for row in json.loads(show(run, capsys, "--failed", "--json"))] == [7]
    assert show(run, capsys, "--failed", "--step", "1") == "no training answers at step 1 with these filters\n"
    monkeypatch.setenv("COLUMNS", "80")
    assert "    why it failed  raised" in show(run, capsys, "--failed")
    assert main(["show", str(run), "--failed", "--worst", "3"]) == 2
    assert "--worst and --failed do not go together" in capsys.readouterr().err


def test_a_line_has_the_prompt_and_the_right_answer_before_the_response(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    head, line, *_ = show(run, capsys).splitlines()
    starts = [head.index(name) for name in ("prompt", "right answer", "response")]
    assert [line[start:].split("  ")[0].strip() for start in starts] == ["2+1=", "3", "".join(PARTS)]


def test_texts_that_are_too_long_for_a_line_get_lines_of_their_own_and_keep_their_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    words = " ".join(f"{number}+" for number in range(60)) + " so #### 72"
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=1, max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit([long_enough(group, words) for group in new_groups(ledger, 1, size=1)])
        ledger.submit([handed(said(task, words), "w1") for task in ledger.lease("w1", 1, 0)])
    monkeypatch.setenv("COLUMNS", "100")
    head, figures, *texts, _ = show(tmp_path, capsys).splitlines()
    assert head.split()[-1] == "worker"
    assert figures.split()[-1] == "w1"
    assert [text.split()[0] for text in texts] == ["prompt", "right", "response"]
    assert texts[-1].startswith("    response      0+ 1+ 2+")
    assert texts[-1].endswith("so #### 72")
    assert len(texts[-1]) == 100


def test_of_equal_rewards_different_prompts_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 3, size=2))
        ledger.score([Scored(task.id, [Reward(1.0)]) for task in work(ledger, 0)])
    groups = [row["group"] for row in json.loads(show(tmp_path, capsys, "--best", "4", "--json"))]
    assert groups[:3] == [3, 2, 1]
    assert [row["parts"] for row in json.loads(show(tmp_path, capsys, "--last", "1", "--json"))] == [{"reward": 1.0}]


def test_lists_are_of_training_answers_unless_asked_otherwise(evaluated: Path, capsys: pytest.CaptureFixture[str]):
    def listed(*words: str) -> list[tuple[str, int]]:
        return [(row["purpose"], row["step"]) for row in json.loads(show(evaluated, capsys, "--json", *words))]

    assert set(listed()) == {("train", 1)}
    assert set(listed("--best", "3")) == {("train", 1)}
    assert set(listed("--eval")) == {("eval", 1)}
    assert set(listed("--train", "--eval")) == {("train", 1), ("eval", 1)}
    assert listed("--eval", "--step", "2") == []
    assert show(evaluated, capsys, "--eval", "--step", "2") == "no evaluation answers at step 2\n"


def test_filters_narrow_a_list(run: Path, capsys: pytest.CaptureFixture[str]):
    def tasks(*words: str) -> set[int]:
        return {row["task"] for row in json.loads(show(run, capsys, "--json", *words))}

    rewards = {row["task"]: row["reward"] for row in json.loads(show(run, capsys, "--json"))}
    known = sorted(value for value in rewards.values() if value is not None)
    assert tasks("--worker", "w1") == {5, 6, 7}
    assert tasks("--source", "sums") == set(rewards)
    assert tasks("--source", "products") == set()
    assert tasks("--min-reward", str(known[-1])) == {task for task, value in rewards.items() if value == known[-1]}
    assert tasks("--max-reward", str(known[0])) == {task for task, value in rewards.items() if value == known[0]}
    assert show(run, capsys, "--worker", "w9") == "no training answers with these filters\n"


def test_the_newest_run_is_shown_without_a_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "late").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    assert main(["show", "6", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["task"] == 6
    assert said.err == "the newest run: runs/late\n"
    assert main(["show", "late", "6", "--json"]) == 0
    assert capsys.readouterr().err == "", "named"


def test_the_best_and_the_worst_are_by_reward(run: Path, capsys: pytest.CaptureFixture[str]):
    rewards = [row["reward"] for row in json.loads(show(run, capsys, "--last", "99", "--json"))]
    known = sorted(reward for reward in rewards if reward is not None)
    assert [row["reward"] for row in json.loads(show(run, capsys, "--worst", "3", "--json"))] == known[:3]
    assert [row["reward"] for row in json.loads(show(run, capsys, "--best", "3", "--json"))] == known[:-4:-1]


def test_a_task_is_shown_with_prompt_answer_reward_and_history(run: Path, capsys: pytest.CaptureFixture[str]):
    told = show(run, capsys, "6")
    assert "".join(PARTS) in told
    assert "\x1b[" not in told, "no colours where there is no terminal"
    for words in (
        "task 6: scored; member 1 of group 3, which is trained",
        "right answer\n3\n",
        "version 0 of step 0, staleness 1, by w1, log-probs mean -0.3",
        "version 1 of step 1, staleness 0",
        "accepted from w1",
        "an audit left out",
    ):
        assert words in told
    assert "tokens    [" not in told
    assert "tokens    [" in show(run, capsys, "6", "--tokens")
    assert "failed: raised" in show(run, capsys, "7")


def test_json_of_a_task_holds_everything(run: Path, capsys: pytest.CaptureFixture[str]):
    told = json.loads(show(run, capsys, "6", "--json", "--tokens"))
    assert [part["text"] for part in told["segments"]] == list(PARTS)
    assert [(part["version"], part["staleness"]) for part in told["segments"]] == [(0, 1), (1, 0)]
    assert len(told["segments"][0]["tokens"]) == told["segments"][0]["num_tokens"]
    assert told["response"] == "".join(PARTS)
    assert told["history"][-1]["what"].startswith("trained at step 2")


def test_what_a_model_says_does_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model": {"path": "offbeat-tiny"}}')
    evil = "fine\x1b]0;gone\x07\nstill fine"
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.publish(version(0, 0))
        (group,) = new_groups(ledger, 1, size=1)
        ledger.admit([long_enough(group, evil)])
        ledger.submit([handed(said(ledger.lease("w1", 1, 0)[0], evil), "w1")])
    for words in ([], ["1"]):
        told = show(tmp_path, capsys, *words)
        assert "\x1b" not in told
        assert "fine\\x1b]0;gone\\x07" in told
    assert json.loads(show(tmp_path, capsys, "1", "--json"))["response"] == evil


def test_each_version_has_a_colour_of_its_own_on_a_terminal(run: Path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("NO_COLOR", None)
    code = "import sys; from offbeat.cli.main import main; sys.exit(main(sys.argv[1:]))"
    shown = subprocess.Popen([sys.executable, "-c", code, "show", str(run), "6"], stdout=theirs, env=env)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not piece:
            break
        text += piece
    os.close(ours)
    assert shown.wait(timeout=60) == 0
    assert b"\x1b[36mTwelve" in text
    assert b"\x1b[32m and a half" in text


def test_parquet_holds_texts_rewards_and_versions(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert "7 trajectories" in show(run, capsys, "--parquet", str(tmp_path / "all.parquet"))
    rows = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["task"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert (rows[5]["answer"], rows[5]["response"]) == ("3", "".join(PARTS))
    assert set(rows[5]["versions"]) == {0, 1}
    assert len(rows[5]["logprobs"]) == len(rows[5]["response_tokens"]) == rows[5]["num_tokens"]
    assert (rows[6]["reward"], rows[6]["error"]) == (None, "raised")
    assert "3 trajectories" in show(run, capsys, "--parquet", str(tmp_path / "one.parquet"), "--step", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet", "one.parquet"]


@pytest.mark.parametrize(
    "words, line",
    [
        (["99"], "task 99 does not exist; this run has tasks 1 to 7"),
        (["x"], "'x' is not a task's ID"),
        (["--best", "0"], "--best is 0; it must be at least 1"),
        (["--best", "1", "--worst", "1"], "--best and --worst do not go together"),
        (["6", "--best", "1"], "--best and a task's ID do not go together"),
        (["--tokens"], "--tokens goes only with a task's ID"),
        (["--parquet", "/nowhere/x.parquet"], "the folder /nowhere does not exist"),
        (["--parquet", "x.parquet", "--json"], "--json and --parquet do not go together"),
        (["--bset", "1"], "did you mean --best?"),
    ],
)
def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str):
    assert main(["show", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "no such run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model": {"path": "offbeat-tiny"}}')
    assert main(["show", str(tmp_path)]) == 2
    assert "holds no ledger yet" in capsys.readouterr().err


@pytest.mark.full
def test_no_torch_is_needed_to_look(run: Path):
    code = (
        "import sys; from offbeat.cli.main import main; status = main(); sys.exit(status or ('torch' in sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, "show", str(run)], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
