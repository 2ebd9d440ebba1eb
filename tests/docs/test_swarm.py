"""The page about swarms is true: its terminals are opened as it says, a worker is killed, and the run ends well."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from doc_reader import ROOT, blocks
from terminals import SMALL, Terminals

pytestmark = pytest.mark.full  # tests/faults has runs of several processes that are quicker to start
PAGE = ROOT / "docs" / "swarm.md"
LINES = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
TRAIN, JOIN, LIST, SHOW, VERIFY, TOKEN, REVOKE, SERVE, TRAINER = LINES


def producers(terminals: Terminals) -> dict[str, int]:
    """How many trajectories each worker has handed in."""
    told = json.loads(terminals.say(SHOW, "--json"))
    return {producer["worker"]: producer["num_trajectories"] for producer in told["producers"]}


def is_serving(terminals: Terminals) -> bool:
    return (terminals.folder / "runs" / "swarm" / "serve.json").is_file()


def test_three_terminals_a_late_worker_is_killed_halfway_and_the_run_finishes(terminals: Terminals):
    first = terminals.start(TRAIN, SMALL, "--run.steps=150 --serve.port", terminals.port)
    terminals.until("the coordinator listens", lambda: is_serving(terminals))
    second = terminals.start(JOIN)
    terminals.until("a worker hands something in", lambda: producers(terminals))
    third = terminals.start(JOIN)
    terminals.until("the late worker hands something in", lambda: len(producers(terminals)) == 2)
    assert first.poll() is None, f"the run ended too early to kill anyone\n{terminals.screen()}"
    os.killpg(third.pid, signal.SIGKILL)
    assert terminals.wait(first) == 0, terminals.screen()
    assert terminals.wait(second) == 0, terminals.screen()
    assert "everything holds" in terminals.say(VERIFY)
    story, listed = terminals.say(SHOW), terminals.say(LIST)
    assert all(name in story and name in listed for name in producers(terminals))
    assert re.search(r"rollout +left ", listed), "the worker that was told that the run is over"
    summary = json.loads((terminals.folder / "runs" / "swarm" / "summary.json").read_text())
    assert summary["steps"] == 150
    assert summary["max_staleness_trained"] <= 2


def test_coordinator_trainer_and_worker_each_in_a_terminal_of_their_own(terminals: Terminals):
    serve = terminals.start(SERVE, SMALL, "--run.steps=4 --serve.port", terminals.port)
    terminals.until("the coordinator listens", lambda: is_serving(terminals))
    assert len(terminals.say(TOKEN).strip()) > 30
    trainer = terminals.start(TRAINER)
    worker = terminals.start(JOIN)
    assert [terminals.wait(window) for window in (serve, trainer, worker)] == [0, 0, 0], terminals.screen()
    assert "everything holds" in terminals.say(VERIFY)
    assert re.search(r"trainer +finished ", terminals.say(LIST))
    (name,) = producers(terminals)
    assert "revoked" in terminals.say(REVOKE.replace("NAME", name))


def test_a_trainer_that_waits_for_a_coordinator_that_is_gone_ends_when_told_to(terminals: Terminals):
    serve = terminals.start(SERVE, SMALL, "--run.steps=4 --serve.port", terminals.port)
    terminals.until("the coordinator listens", lambda: is_serving(terminals))
    trainer = terminals.start(TRAINER)
    terminals.until("the trainer has joined", lambda: re.search(r"trainer +", terminals.say(LIST)))
    os.killpg(serve.pid, signal.SIGKILL)
    terminals.until("the trainer misses its coordinator", lambda: "has not answered" in terminals.screen())
    os.killpg(trainer.pid, signal.SIGTERM)
    trainer.wait(10)
    assert "trainer stopped by SIGTERM" in terminals.screen()
