"""The spool: whole files or none, and what a killed worker left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from blake3 import blake3
from fake_coordinator import Desk, a_task
from support_files import SUPPORT

from offbeat.errors import UserError
from offbeat.ledger.errors import Fenced
from offbeat.ledger.records import Outcome
from offbeat.testing.paced import PacedEngine, PacedSettings
from offbeat.trajectory import End, Segment, Trajectory
from offbeat.waiting import Notifier
from offbeat.weights.publish import Publisher
from offbeat.worker.spool import Outbox, Spool, Unsent
from offbeat.worker.worker import Worker

SCRIPT = SUPPORT / "killable_worker.py"


def a_trajectory(task: int, end: End | None = End.STOP) -> Trajectory:
    trajectory = Trajectory(task, np.arange(3), max_new_tokens=9)
    trajectory.append(Segment(0, np.arange(5), logprobs=-np.ones(5), version=2, kv_version=2, worker="w"), end)
    return trajectory


def test_what_is_put_is_left_until_it_is_removed(tmp_path):
    spool = Spool(tmp_path / "w")
    items = [Unsent(a_trajectory(7), 2), Unsent(a_trajectory(7, None), 3), Unsent(a_trajectory(5), 1)]
    for item in items:
        spool.put(item)
    spool.close()
    spool = Spool(tmp_path / "w")
    assert spool.left() == [items[2], items[0], items[1]]
    spool.remove((7, 2))
    spool.remove((7, 2))
    assert [unsent.key for unsent in spool.left()] == [(5, 1), (7, 3)]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other magic", "wrong content"])
def test_a_damaged_file_is_set_aside_with_a_warning_and_the_others_are_sent(damage, tmp_path, caplog):
    spool = Spool(tmp_path)
    spool.put(Unsent(a_trajectory(1), 1))
    spool.put(Unsent(a_trajectory(2), 1))
    path = min(tmp_path.glob("*.trajectory"))
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            data = data[:-3]
        case "flipped":
            data[data.index(np.arange(5, dtype=np.int32).tobytes()) + 4] ^= 4  # another token, nothing else
        case "empty":
            data = bytearray()
        case "other magic":
            data[0] ^= 1
        case "wrong content":
            data = data[:16] + blake3(b"\x92\x01\xc4\x01\x80").digest() + b"\x92\x01\xc4\x01\x80"
    path.write_bytes(bytes(data))
    with caplog.at_level(logging.WARNING):
        assert [unsent.key for unsent in spool.left()] == [(2, 1)]
    assert "damaged" in caplog.text
    assert (tmp_path / "damaged" / path.name).read_bytes() == bytes(data)
    assert [unsent.key for unsent in spool.left()] == [(2, 1)]


def test_drafts_of_a_killed_writer_are_removed(tmp_path):
    draft = tmp_path / ".000000000001-000001.trajectory.123.draft"
    draft.write_bytes(b"half")
    assert Spool(tmp_path).left() == []
    assert not draft.exists()


def test_two_workers_cannot_share_a_spool(tmp_path):
    first = Spool(tmp_path)
    with pytest.raises(UserError, match="in use by another worker"):
        Spool(tmp_path)
    first.close()
    Spool(tmp_path).close()


def test_a_spool_that_cannot_be_written_is_refused_in_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Spool(tmp_path / "file" / "spool")


def test_answers_that_came_too_late_are_told_in_one_line_and_not_one_by_one(tmp_path, caplog):
    spool = Spool(tmp_path)
    for task in (1, 2, 3):
        spool.put(Unsent(a_trajectory(task), 1))

    class Client:
        async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
            if trajectory.task == 2:
                return Outcome.STORED
            raise Fenced(f"lease 1 of task {trajectory.task} is over: the task was leased again (lease 2)")

    async def resend() -> None:
        async with asyncio.TaskGroup() as group:
            await Outbox("w", Client(), spool, Notifier(asyncio.Future())).resend(group)

    with caplog.at_level(logging.WARNING):
        asyncio.run(resend())
    (told,) = caplog.messages
    why = "the coordinator discards an answer if its task was given to another worker or has ended"
    assert told == f"worker w: 2 answers came too late: {why}"
    assert spool.left() == []


@pytest.mark.full
def test_a_worker_killed_between_writing_and_the_answer_sends_it_when_it_starts_again(tmp_path):
    version = Publisher(tmp_path / "weights").write(1, 1, None, {"w": torch.ones(2)})
    folder = tmp_path / "spool"
    paths = os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)])
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps([1, version.digest, str(version.path)])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})
    assert process.stdout is not None
    told = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    told += [json.loads(line) for line in process.stdout if line.endswith(b"\n")]
    assert process.wait(timeout=60) == -signal.SIGKILL

    async def second_life() -> Desk:
        desk = Desk()
        desk.publish(version)
        desk.add(*(a_task(n, 5 + 3 * n) for n in range(4)))
        for task, _, _ in told:  # the leases of the first life
            desk.held[task] = desk.open.pop(task)
        worker = Worker("w", PacedEngine(PacedSettings(base_s=0.005)), desk, spool=Spool(folder))
        async with asyncio.timeout(60):
            running = asyncio.create_task(worker.run())
            await desk.until(lambda: len(desk.done) == 4)
            await worker.drain()
            await running
        return desk

    desk = asyncio.run(second_life())
    for task, fence, tokens in told:
        assert desk.done[task].tokens.tolist() == tokens
        assert desk.names("submit").count((task, fence)) == 1
    names = [name for _, name, _ in desk.calls if name in ("submit", "lease")]
    assert names[: len(told)] == ["submit"] * len(told)
    assert list(folder.glob("*.trajectory")) == []
