"""Runs with episodes whose processes are killed: nothing is lost or doubled, and no observation differs from its
replay."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from doc_reader import ROOT
from episode_scenes import EOS, TOKENIZER
from killed_runs import final_digest, kill, start, train, wait_for_lines
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import Supervised
from offbeat.environments.formats import PlainFormat
from offbeat.environments.wire import PartInfo
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.locate import locate
from offbeat.trajectory import Trajectory, turns_of

GAME = (
    *("--model.path=offbeat-tiny-tools", "--task.source=environment", "--task.path=guess.py:SlowGuess"),
    *("--task.prompt=Guess a number, ", "--rollout.max-prompt-tokens=16", "--rollout.max-new-tokens=64"),
    *("--environment.max-turns=5", "--environment.max-turn-tokens=8"),
)
SLOW = """
import time


class SlowGuess(Guess):
    def step(self, turn):
        time.sleep(0.02)
        return super().step(turn)
"""


def with_game(folder: Path) -> Path:
    shutil.copy(ROOT / "examples" / "guess.py", folder / "guess.py")
    (folder / "guess.py").open("a").write(SLOW)
    return folder


def assert_replays(run: Path) -> int:
    """Plays every stored episode once more; returns their number. A kill may have left any beginning behind."""
    kind = locate(f"{run.parent.parent / 'guess.py'}:Guess", "task.path")
    form = PlainFormat(TOKENIZER, (EOS,), PartInfo(True, False, (), False, (), True), "guess", 256)
    with Ledger(run / "ledger.sqlite", LedgerTerms(), read_only=True) as ledger:
        query = """SELECT j.seq, j.digest, g.seed FROM trajectories j JOIN tasks t ON t.id = j.task
                   JOIN groups g ON g.id = t.group_id"""
        found = ledger.execute(query).fetchall()
        bodies = ledger.bodies.load([(seq, digest) for seq, digest, _ in found])
        for seq, _, seed in found:
            assert_replay(bodies[seq], kind(), seed, form)
    return len(found)


def assert_replay(episode: Trajectory, game, seed: int, form: PlainFormat) -> None:
    tokens = episode.tokens.tolist()
    said = form.opening(game.begin({}, seed))
    at = 0
    turns = turns_of(episode, form.stop_token_ids)
    for number, (first, last) in enumerate(turns):
        assert tokens[at:first] == said, "the environment said something else"
        at = last
        if tokens[last - 1] not in form.stop_token_ids:
            return
        turn = form.turn(number, tokens[first:last])
        try:
            reply = game.step(turn)
        except ValueError as error:
            reply = f"error: ValueError: {error}"
        said = form.reply(turn, reply) if isinstance(reply, str) else []
    assert tokens[at:] in ([], said)


def environment_children(run: Supervised) -> list[int]:
    """Ids of the run's processes with environments, without the guards that have their command among their own."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.living()}
    return [pid for pid, words in commands.items() if b"environments.child" in words and b"guard.py" not in words]


@pytest.mark.full
@pytest.mark.timeout(500)
def test_a_run_of_episodes_whose_processes_are_killed_in_turn_loses_and_doubles_nothing(tmp_path):
    num_steps = 10
    run = Supervised(
        with_game(tmp_path),
        *(*TINY, *GAME, "--schedule.mode=alternate", "--schedule.max-staleness=2", "--rollout.workers=2"),
        *("--schedule.over-provision=2", f"--run.steps={num_steps}", "--checkpoint.every=3"),
    )
    num_children = 0
    for step, name in enumerate(["worker-1", "", "coordinator", "worker-2", "", "trainer"], start=1):
        run.until_step(step)
        if name:
            run.kill(name)
        else:
            for pid in environment_children(run)[:1]:
                os.kill(pid, signal.SIGKILL)
                num_children += 1
    assert "offbeat:" not in run.finish()
    check_whole(run.run, num_steps)
    assert num_children
    assert assert_replays(run.run) >= num_steps * 8


@pytest.mark.full
@pytest.mark.timeout(500)
def test_an_exact_run_of_episodes_that_is_killed_ends_in_the_same_weights(tmp_path):
    with_game(tmp_path)
    words = [*TINY, *GAME, "--run.exact", "--run.steps=5", "--checkpoint.every=2"]
    words = [word for word in words if not word.startswith("--run.name")]
    train(tmp_path, *words, "--run.name=whole")
    killed = start(tmp_path, *words, "--run.name=cut")
    wait_for_lines(tmp_path / "runs" / "cut" / "metrics.jsonl", 3, killed)
    kill(killed)
    again = start(tmp_path, "--resume", "runs/cut")
    wait_for_lines(tmp_path / "runs" / "cut" / "metrics.jsonl", 4, again)
    kill(again)
    train(tmp_path, "--resume", "runs/cut")
    assert final_digest(tmp_path / "runs" / "cut", 5) == final_digest(tmp_path / "runs" / "whole", 5)
    assert assert_replays(tmp_path / "runs" / "cut") >= 5 * 8
    assert json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())["finished"]
