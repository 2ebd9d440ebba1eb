"""A real process, really killed: what it was told is stored is there afterwards, and it ends as if nobody had."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_life import undisturbed
from support_files import SUPPORT

from offbeat.ledger.ledger import Ledger

SCRIPT = SUPPORT / "killable_run.py"
NUM_KILLS = 5
LONGEST_LIFE_S = 60.0


def start(folder: Path, order: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)])
    command = [sys.executable, str(SCRIPT), str(folder), "2", str(order)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})


def kill_after(process: subprocess.Popen[bytes], num_lines: int, delay_s: float) -> list[list]:
    """Kills a process a moment after it told that many things; returns all that it told."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if len(lines) == num_lines:
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
    process.wait(timeout=LONGEST_LIFE_S)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def check_acknowledged(folder: Path, told: list[list]) -> None:
    connection = sqlite3.connect(folder / "ledger.sqlite")
    digests = dict(connection.execute("SELECT task, lower(hex(digest)) FROM trajectories"))
    rewards = dict(connection.execute("SELECT task, value FROM rewards"))
    versions = dict(connection.execute("SELECT number, digest FROM versions"))
    ordinals = {ordinal for (ordinal,) in connection.execute("SELECT ordinal FROM groups")}
    connection.close()
    for what, *facts in told:
        match what:
            case "stored":
                assert digests[facts[0]] == facts[1]
            case "scored":
                assert rewards[facts[0]] == facts[1]
            case "published":
                assert versions[facts[0]] == facts[1]
            case "admitted":
                assert ordinals >= set(facts[0])


@pytest.mark.full
def test_a_run_that_is_really_killed_keeps_what_it_acknowledged_and_trains_the_same_data(tmp_path: Path):
    rng = random.Random(5)
    told: list[list] = []
    num_killed = 0
    for kill in range(NUM_KILLS):
        process = start(tmp_path, order=kill)
        told += kill_after(process, num_lines=rng.randint(1, 30), delay_s=rng.uniform(0, 0.01))
        num_killed += process.returncode == -signal.SIGKILL
        check_acknowledged(tmp_path, told)
        with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.verify().violations == ()
    assert num_killed >= NUM_KILLS / 2, "lives were too short to be killed"
    process = start(tmp_path, order=1)
    out, _ = process.communicate(timeout=LONGEST_LIFE_S)
    told += [json.loads(line) for line in out.splitlines()]
    check_acknowledged(tmp_path, told)
    _, trained = next(facts for facts in reversed(told) if facts[0] == "done")
    expected = undisturbed(tmp_path / "undisturbed.sqlite")
    in_last_life = {step: data for step, data in json.loads(json.dumps(expected)).items() if step in trained}
    assert trained == in_last_life
    assert str(max(expected)) in trained, "the last weights depend on all that was trained"
