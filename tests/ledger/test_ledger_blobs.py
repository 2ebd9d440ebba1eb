"""Large bodies are files beside the ledger: whole before their row is, and found out when they are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from ledger_run import SAMPLING, answer, claim, handed, new_groups, score_all, send, version

from offbeat.ledger import bodies
from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome
from offbeat.trajectory import End, Segment, Task, Trajectory

NUM_TOKENS = 40_000


@pytest.fixture
def files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_ROW_BYTES", 0)


def blobs(ledger: Ledger) -> list[Path]:
    return sorted(ledger.path.parent.glob("blobs/??/*"))


def begin(ledger: Ledger, size: int = 2) -> list[Task]:
    ledger.admit(new_groups(ledger, 1, size=size))
    return ledger.lease("w", size, 0)


def long_answer(task: Task) -> Trajectory:
    trajectory = task.new_trajectory()
    tokens, logprobs = np.arange(NUM_TOKENS) % 1000, -np.linspace(0, 1, NUM_TOKENS)
    trajectory.append(Segment(0, tokens, logprobs=logprobs, version=0, kv_version=0), End.LENGTH)
    return trajectory


def test_a_long_trajectory_is_a_file_named_by_its_digest_and_comes_back_as_it_was(ledger: Ledger, tmp_path: Path):
    (group,) = new_groups(ledger, 1, size=2)
    sampling = msgspec.structs.replace(SAMPLING, max_new_tokens=NUM_TOKENS)
    ledger.admit([replace(group, sampling=sampling)])
    long, short = ledger.lease("w", 2, 0)
    sent = {long.id: long_answer(long), short.id: answer(short, [0])}
    ledger.submit([handed(trajectory) for trajectory in sent.values()])
    (file,) = blobs(ledger)
    rows = ledger.execute("SELECT task, digest, body IS NULL FROM trajectories ORDER BY task").fetchall()
    assert [in_file for _, _, in_file in rows] == [True, False]
    assert file.relative_to(tmp_path) == Path("blobs") / rows[0][1].hex()[:2] / rows[0][1].hex()
    score_all(ledger)
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as fresh:
        batch = claim(fresh, 0, 1, 0)
    assert batch is not None
    assert {member.task: member.trajectory for member in batch.groups[0].members} == sent


@pytest.mark.usefixtures("files_only")
def test_a_partial_in_a_file_is_carried_on_from_it(ledger: Ledger, tmp_path: Path):
    task = begin(ledger)[0]
    partial = answer(task, [0], end=None)
    assert send(ledger, partial) is Outcome.PARTIAL
    with Ledger(tmp_path / "ledger.sqlite") as fresh:
        again = fresh.lease("v", 1, 0)[0]
        assert again.prefix == partial
        assert send(fresh, answer(again, [0]), "v", 2) is Outcome.STORED
    assert len(blobs(ledger)) == 2
    assert ledger.sweep() == len(partial.encode()), "nobody needs the beginning any more"
    assert len(blobs(ledger)) == 1


@pytest.mark.usefixtures("files_only")
def test_the_same_body_again_is_harmless(ledger: Ledger):
    task = begin(ledger)[0]
    trajectory = answer(task, [0])
    body, digest = trajectory.encode(), blake3(trajectory.encode()).digest()
    for _ in range(2):
        ledger.blobs.write(digest, body)
    assert ledger.submit([handed(trajectory), handed(trajectory)]) == [Outcome.STORED, Outcome.REPEATED]
    assert len(blobs(ledger)) == 1


@pytest.mark.usefixtures("files_only")
def test_a_damaged_or_missing_file_is_found_and_named(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.publish(version(0, 0))
        tasks = begin(ledger, size=3)
        ledger.submit(
            [handed(answer(tasks[0], [0])), handed(answer(tasks[1], [0])), handed(answer(tasks[2], [0], end=None))]
        )
        assert ledger.verify().holds
        files = [ledger.blobs.path(d) for (d,) in ledger.execute("SELECT digest FROM trajectories ORDER BY task")]
        files += [ledger.blobs.path(d) for (d,) in ledger.execute("SELECT digest FROM partials")]
        files[0].write_bytes(b"x" + files[0].read_bytes()[1:])
        files[1].unlink()
        files[2].unlink()
        found = ledger.verify().violations
        assert [line for line in found if "task 1 cannot be read" in line and "is damaged: its content" in line]
        assert [line for line in found if "task 2 cannot be read" in line and "No such file" in line]
        assert [line for line in found if "the partial of task 3 cannot be read" in line]
        assert ledger.verify(with_bodies=False).holds
    with Ledger(tmp_path / "ledger.sqlite") as fresh:
        with pytest.raises(LedgerError, match="restore it from a backup"):
            fresh.unscored(9)
        with pytest.raises(LedgerError, match="restore it from a backup"):
            fresh.lease("w", 9, 0)


@pytest.mark.usefixtures("files_only")
def test_file_and_folder_are_on_disk_before_the_row_is(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    task = begin(ledger)[0]
    order: list[str] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    ledger.connection.set_trace_callback(lambda sql: order.append(sql) if sql == "COMMIT" else None)
    trajectory = answer(task, [0])
    send(ledger, trajectory)
    (file,) = blobs(ledger)
    folder = file.parent.name
    assert order[-3:] == [file.name + ".new", folder, "COMMIT"]
    assert "blobs" in order[:-3], "a new folder is an entry of another one"


KILLED = """
import os, signal, sys
from pathlib import Path
from ledger_run import answer, handed
from offbeat.ledger import bodies
from offbeat.ledger.ledger import Ledger

bodies.MAX_ROW_BYTES = 0
write = bodies.Blobs.write

def write_and_die(self, digest, body):
    write(self, digest, body)
    os.kill(os.getpid(), signal.SIGKILL)

bodies.Blobs.write = write_and_die
ledger = Ledger(Path(sys.argv[1]))
task = ledger.lease("w", 1, 0)[0]
ledger.submit([handed(answer(task, [0]))])
"""


def test_a_process_killed_between_file_and_commit_leaves_a_file_that_is_swept(ledger: Ledger, tmp_path: Path):
    ledger.admit(new_groups(ledger, 1))
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "ledger.sqlite")], env={**os.environ, "PYTHONPATH": paths}
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(blobs(ledger)) == 1
    assert ledger.verify().holds
    assert ledger.counts().trajectories.accepted == 0
    (file,) = blobs(ledger)
    (file.parent / (file.name + ".new")).write_bytes(b"half of it")
    assert ledger.sweep() > 0
    assert blobs(ledger) == []
