"""Judges of a real run that are killed or hang: nothing is lost, and no engine waits for them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import MARK, PACED, WITHIN_S, Supervised, rows, until
from offbeat.client.credentials import TOKEN_VARIABLE
from offbeat.launch.joining import new_token

REWARD = """
import json, os, time
from pathlib import Path

def reward(prompt, tokens):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\\n")
    while "HANGS" in os.environ:
        time.sleep(1)
    return 1.0 + len(tokens) % 2
"""
NUM_STEPS = 4
NUM_AHEAD = 2 * 2 * 4
"""Samples that may be generated before the first is trained: two steps of two groups of four."""


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Supervised]]:
    """Starts a run without reward processes of its own; whatever a test leaves behind is ended."""
    started: list[Supervised] = []

    def begin(timeout_s: float) -> Supervised:
        (tmp_path / "judge.py").write_text(REWARD)
        elsewhere = ("--task.reward=judge.py:reward", "--reward.processes=0", f"--reward.timeout-s={timeout_s}")
        overlap = ("--schedule.mode=overlap", "--schedule.max-staleness=2", "--rollout.workers=1")
        run = Supervised(tmp_path, *TINY, *PACED, *overlap, *elsewhere, f"--run.steps={NUM_STEPS}")
        started.append(run)
        until(lambda: (run.run / "serve.json").is_file(), "the coordinator to listen")
        return run

    yield begin
    for run in started:
        for pid in run.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class RemoteJudge:
    """`offbeat worker --role reward`, as a user starts it."""

    def __init__(self, run: Supervised, name: str, **environment: str):
        url = json.loads((run.run / "serve.json").read_text())["url"]
        self.notes, self.errors = run.folder / f"{name}.notes", run.folder / f"{name}.errors"
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        own = {
            "PYTHONPATH": path,
            MARK: run.mark,
            "NOTES": str(self.notes),
            TOKEN_VARIABLE: new_token(run.run, "reward"),
        }
        words = ["worker", "--role", "reward", "--join", url, "--name", name, "--dir", str(run.folder / name)]
        words += ["--task.reward", "judge.py:reward"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", *words],
                cwd=run.folder,
                env={**os.environ, **own, **environment},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def begun(self) -> list[dict]:
        """The samples that it has begun to judge."""
        return rows(self.notes)

    def until_begun(self) -> None:
        until(lambda: self.begun() or self.process.poll() is not None, "a judge to begin")
        assert self.process.poll() is None, self.errors.read_text()


def count(run: Supervised, what: str) -> int:
    connection = sqlite3.connect(f"file:{run.run / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(f"SELECT COUNT(*) FROM {what}").fetchone()[0]
    finally:
        connection.close()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_a_judge_held_when_it_was_killed_another_judges(start):
    run = start(timeout_s=3600)
    doomed = RemoteJudge(run, "doomed", HANGS="yes")
    doomed.until_begun()
    doomed.process.kill()
    assert doomed.process.wait(WITHIN_S) == -signal.SIGKILL
    assert count(run, "rewards") == 0
    other = RemoteJudge(run, "other")
    assert run.finish() == ""
    assert other.process.wait(WITHIN_S) == 0, other.errors.read_text()
    check_whole(run.run, NUM_STEPS)
    assert count(run, "rewards WHERE error IS NOT NULL") == 0
    assert all(sample in other.begun() for sample in doomed.begun())


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_judge_that_hangs_holds_no_engine_and_one_that_is_asked_to_stop_gives_back_at_once(start):
    run = start(timeout_s=3600)
    hung = RemoteJudge(run, "hung", HANGS="yes")
    hung.until_begun()
    until(lambda: count(run, "trajectories") == NUM_AHEAD, "the engines to generate all that they may")
    assert count(run, "rewards") == 0
    hung.process.send_signal(signal.SIGTERM)
    assert hung.process.wait(WITHIN_S) == 128 + signal.SIGTERM
    assert hung.errors.read_text() == "offbeat: judge hung stopped by SIGTERM\n"
    other = RemoteJudge(run, "other")
    assert run.finish() == ""
    assert other.process.wait(WITHIN_S) == 0, other.errors.read_text()
    check_whole(run.run, NUM_STEPS)
    assert count(run, "rewards WHERE error IS NOT NULL") == 0
    assert all(sample in other.begun() for sample in hung.begun())
