"""Runs whose trainer has several ranks: however often a rank dies or hangs, they end in the weights of one rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from supervised_runs import TINY, check_whole, final_digest

WITHIN_S = 280.0
EXACT = (*TINY, "--run.exact", "--rollout.workers=1", "--batch.tokens-per-microbatch=64", "--checkpoint.every=1")
RANDOM_STEPS = 60
POINTS = (
    "reconciled!exit,batch-claimed,order-given:2!stop,version-written",
    "order-received:3,parts-coded!stop,version-committed!exit,snapshot-taken:2!stop",
    "rows-written!stop,checkpoint-drafted,checkpoint-saved!exit,order-received:7!exit",
)
"""Crash points of one run each: some of rank 0, some of another rank, some of whichever passes first."""


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "offbeat", "train", *EXACT, f"--run.dir={folder}", *more]


def run(folder: Path, *more: str, crash_at: str = "") -> Path:
    folder.mkdir()
    once = folder / "once"
    once.mkdir()
    environment = {**os.environ, "OFFBEAT_CRASH_AT": crash_at, "OFFBEAT_CRASH_ONCE": str(once)}
    done = subprocess.run(command(folder, *more), env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    died = {re.split("[:!]", point)[0] for point in crash_at.split(",") if point}
    assert {file.name for file in once.iterdir()} == died, "a point was never passed"
    return folder / "a"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("points", POINTS)
def test_a_gang_that_dies_at_many_points_ends_in_the_weights_of_one_rank(tmp_path, points):
    more = ("--run.steps=3", "--trainer.lost-after-s=4")
    alone = run(tmp_path / "alone", *more)
    killed = run(tmp_path / "killed", *more, "--trainer.ranks=2", crash_at=points)
    check_whole(killed, 3)
    assert final_digest(killed) == final_digest(alone)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    return final_digest(run(tmp_path_factory.mktemp("undisturbed") / "alone", f"--run.steps={RANDOM_STEPS}"))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_a_gang_that_dies_at_random_moments_ends_in_the_weights_of_one_rank(tmp_path, undisturbed, seed):
    """Five deaths a run: now rank 0, now rank 1, killed or frozen, from their start to the end of the run."""
    random, path = Random(seed), tmp_path / "a"
    words = command(tmp_path, f"--run.steps={RANDOM_STEPS}", "--trainer.ranks=2", "--trainer.lost-after-s=4")
    words.append("--trainer.start-within-s=40")
    with (tmp_path / "out.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    num_deaths = 0
    try:
        while num_deaths < 5 and process.poll() is None:
            gangs = num_deaths + 1
            until(lambda: process.poll() is not None or len(started(path)) >= 2 * gangs, 100.0)  # noqa: B023
            time.sleep(random.uniform(0.0, 8.0))
            if alive := [pid for pid in started(path)[-2:] if is_running(pid)]:
                os.kill(random.choice(alive), random.choice((signal.SIGKILL, signal.SIGSTOP)))
                num_deaths += 1
        assert process.wait(WITHIN_S) == 0, (tmp_path / "out.log").read_text()
    finally:
        process.kill()
        process.wait()
    assert num_deaths == 5, "the run ended before"
    check_whole(path, RANDOM_STEPS)
    assert final_digest(path) == undisturbed


def started(path: Path) -> list[int]:
    """Process ids of all ranks of all gangs so far, in the order of their start."""
    file = path / "logs" / "supervisor.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
    return [row["pid"] for row in rows if row["event"] == "started" and row["process"].startswith("trainer")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZT"
    except FileNotFoundError:
        return False


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_is_resumed_on_other_numbers_of_ranks(tmp_path):
    alone = run(tmp_path / "alone", "--run.steps=4")
    path = run(tmp_path / "changing", "--run.steps=1", "--trainer.ranks=2")
    for steps, ranks in ((2, 1), (3, 3), (4, 2)):
        again = [sys.executable, "-m", "offbeat", "train", f"--resume={path}", f"--run.steps={steps}"]
        subprocess.run([*again, f"--trainer.ranks={ranks}"], check=True, timeout=WITHIN_S, capture_output=True)
    check_whole(path, 4)
    assert final_digest(path) == final_digest(alone)


def until(is_true, within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < until_s, "waited too long"
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_frozen_gang_cannot_go_on_once_another_has_taken_over(tmp_path):
    """The whole gang is frozen, its supervisor too; another trainer takes over and commits; then all wake up."""
    serve = [
        sys.executable,
        "-m",
        "offbeat",
        "serve",
        *EXACT,
        f"--run.dir={tmp_path}",
        "--run.steps=200",
        "--log.console=plain",
    ]
    out = (tmp_path / "serve.log").open("wb")
    processes = [subprocess.Popen(serve, stdout=out, stderr=out)]
    try:
        path = tmp_path / "a"
        until(lambda: b"http://" in (tmp_path / "serve.log").read_bytes())
        url = re.search(r"http://[\d.:]+", (tmp_path / "serve.log").read_text())[0]

        def start(role: str, folder: str, **place: str) -> subprocess.Popen:
            name = {"trainer": "trainer", "worker": "rollout"}[role]
            token = [sys.executable, "-m", "offbeat", "worker", "token", str(path), "--role", name]
            told = subprocess.run(token, check=True, capture_output=True, text=True, timeout=60).stdout
            environment = {**os.environ, **place, "OFFBEAT_TOKEN": told.strip().splitlines()[-1]}
            words = [role, "--join", url, "--dir", str(tmp_path / folder), "--trust-coordinator", "--allow-plain"]
            with (tmp_path / f"{folder}-{place.get('RANK', 0)}.log").open("wb") as log:
                made = [sys.executable, "-m", "offbeat", *words]
                processes.append(subprocess.Popen(made, env=environment, stdout=log, stderr=log))
            return processes[-1]

        def num_steps() -> int:
            file = path / "metrics.jsonl"
            return len([row for row in map(json.loads, file.read_text().splitlines()) if "reward" in row])

        start("worker", "worker")
        from gangs import environment_of, free_port

        port = free_port()
        old = [start("trainer", "old", **environment_of(rank, 2, port)) for rank in range(2)]
        until(lambda: num_steps() >= 2)
        for process in old:
            os.kill(process.pid, signal.SIGSTOP)
        before = num_steps()
        new = start("trainer", "new")  # without a checkpoint of the run: refused, so it begins from scratch below
        status = new.wait(120)
        assert status != 0
        token_free = [sys.executable, "-m", "offbeat", "trainer", "--join", url, "--dir", str(tmp_path / "new")]
        with (tmp_path / "again.log").open("wb") as log:
            words = [*token_free, "--trust-coordinator", "--allow-plain", "--from-scratch"]
            processes.append(subprocess.Popen(words, stdout=log, stderr=log))
        until(lambda: num_steps() > before)
        for process in old:
            os.kill(process.pid, signal.SIGCONT)
        statuses = [process.wait(120) for process in old]
        assert statuses[0] != 0, "rank 0 was refused, or gave its gang up"
        assert processes[-1].poll() is None, "the new trainer goes on"
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
            process.wait()
        out.close()
