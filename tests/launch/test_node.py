"""A node keeps its workers running: each with its own GPUs, restarted when it dies, ended with the node's parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import PACED, Supervised, rows, until
from offbeat.cli.main import main
from offbeat.launch.node import GangPart, Node, NodePlan
from offbeat.launch.processes import Child

OVERLAP = ("--schedule.mode=overlap", "--schedule.max-staleness=2")


def node(folder: Path, plan: NodePlan, *words: str) -> Node:
    return Node(
        plan, folder, folder / "logs", ["--join", "http://127.0.0.1:1"], {"rollout": "a", "trainer": "b"}, words
    )


def devices(child: Child) -> str | None:
    return child.environment.get("CUDA_VISIBLE_DEVICES")


def test_each_worker_has_gpus_of_its_own_and_ranks_have_the_first_ones(tmp_path: Path):
    plan = NodePlan("n", 2, ["0", "1", "2", "4", "5", "6"], 2, GangPart(2, 2))
    made = node(tmp_path, plan)
    assert [devices(child) for child in (made.trainer, *made.ranks)] == ["0,1", "0,1"]
    assert [devices(child) for child in made.workers] == ["2,4", "5,6"]
    assert [child.name for child in made.workers] == ["worker-1", "worker-2"]
    assert devices(node(tmp_path, NodePlan("n", 1, [])).workers[0]) is None, "without GPUs, nothing is hidden"


def test_ranks_meet_those_of_other_machines_and_only_the_first_of_all_needs_a_token(tmp_path: Path):
    made = node(tmp_path, NodePlan("n", 0, [], gang=GangPart(2, 6, 4, ("10.0.0.1", 29500))))
    places = made._gang_places(2)
    assert [(place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]) for place in places] == [
        ("4", "6", "0"),
        ("5", "6", "1"),
    ]
    assert {place["MASTER_ADDR"] + ":" + place["MASTER_PORT"] for place in places} == {"10.0.0.1:29500"}
    assert "GLOO_SOCKET_IFNAME" not in places[0], "the loopback interface leads nowhere"
    assert [child.role for child in (made.trainer, *made.ranks)] == [None, None]
    first = node(tmp_path, NodePlan("n", 0, [], gang=GangPart(1, 6, 0, ("10.0.0.1", 29500))))
    assert first.trainer.role == "trainer"
    assert asyncio.run(first._token("trainer")) == {"OFFBEAT_TOKEN": "b"}


@pytest.mark.parametrize(
    "words, why",
    [
        (["--workers=1"], "one of the arguments --join --join-file is required"),
        (["--join=http://127.0.0.1:1", "--workers=-1"], "--workers -1: give 0 or more"),
        (["--join=http://127.0.0.1:1", "--workers=0"], "nothing to run here: give --workers or --ranks"),
        (["--join=http://127.0.0.1:1", "--devices=5"], "--devices 5: 5 is not a GPU"),
        (["--join=http://127.0.0.1:1", "--ranks=3"], "--ranks 3: each rank takes a GPU, and there are 2 here"),
        (["--join=http://127.0.0.1:1", "--ranks=1", "--num-ranks=4"], "ranks on several machines need --meet"),
        (["--join=http://127.0.0.1:1", "--ranks=2", "--num-ranks=1"], "the ranks here must be among all of them"),
        (["--join=http://127.0.0.1:1", "--ranks=1", "--meet=here"], "--meet 'here': write it as HOST:PORT"),
        (["--join-file=none.json", "--patience=0"], "--join-file none.json: not there after 0 s"),
    ],
)
def test_mistakes_get_one_line(words, why, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.chdir(tmp_path)
    assert main(["node", *words, "--dir=n"]) in (1, 2)
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


class OnNodes:
    """A run whose workers all run on nodes, each a process of its own."""

    def __init__(self, folder: Path, num_steps: int):
        self.folder, self.nodes = folder, list[subprocess.Popen[bytes]]()
        served = ("--rollout.workers=0", "--serve.certificate=auto", f"--join-file={folder / 'join.json'}")
        self.run = Supervised(folder, *TINY, *PACED, *OVERLAP, *served, f"--run.steps={num_steps}")

    def node(self, name: str, *words: str, parent: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "offbeat", "node", "--join-file", str(self.folder / "join.json")]
        command += ["--name", name, "--dir", str(self.folder / name), *words]
        if parent:  # a shell between, which waits
            command = ["sh", "-c", '"$@"; exit', "sh", *command]
        environment = {**os.environ, **self.run.environment}
        with (self.folder / f"{name}.txt").open("ab") as said:
            started = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        self.nodes.append(started)
        return started

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def diary(self, name: str) -> list[dict[str, Any]]:
        return rows(self.folder / name / "logs" / "supervisor.jsonl")

    def pids(self, name: str) -> dict[str, int]:
        """The processes that run on a node, by name."""
        running: dict[str, int] = {}
        for row in self.diary(name):
            if row["event"] == "started":
                running[row["process"]] = row["pid"]
            else:
                running.pop(row["process"], None)
        return running

    def close(self) -> None:
        self.run.end()
        for started in self.nodes:
            started.kill()
            started.wait()


@pytest.fixture
def on_nodes(tmp_path: Path) -> Iterator[OnNodes]:
    made = OnNodes(tmp_path, 120)
    yield made
    made.close()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_workers_and_nodes_are_killed_and_the_run_ends_whole(on_nodes: OnNodes):
    first = on_nodes.node("first", "--workers=2")
    on_nodes.run.until_step(3)
    killed = on_nodes.pids("first")["worker-1"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: on_nodes.pids("first").get("worker-1") not in (None, killed), "the worker to be back")
    assert "worker-1 died (signal 9); starting again" in on_nodes.said("first")
    first.kill()
    first.wait()
    orphans = set(on_nodes.pids("first").values())
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in orphans), "the node's workers to end", 30)
    again, other = on_nodes.node("first", "--workers=2"), on_nodes.node("other", "--workers=1")
    assert on_nodes.run.finish() == ""
    assert [again.wait(60), other.wait(60)] == [0, 0], on_nodes.said("first")
    check_whole(on_nodes.run.run, 120)
    told = subprocess.run(
        [sys.executable, "-m", "offbeat", "worker", "list", str(on_nodes.run.run), "--json"],
        env={**os.environ, **on_nodes.run.environment},
        capture_output=True,
        check=True,
    )
    names = {one["name"] for one in json.loads(told.stdout) if one["role"] == "rollout"}
    assert names == {"first-1", "first-2", "other-1"}, "a worker that came back is the same one"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_node_ends_with_the_process_that_started_it(on_nodes: OnNodes):
    shell = on_nodes.node("n", "--workers=1", parent="sh")
    on_nodes.run.until_step(2)
    pids = on_nodes.pids("n").values()
    shell.kill()
    shell.wait()
    until(lambda: "stopped: the process that started it has ended" in on_nodes.said("n"), "the node to end", 60)
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_worker_that_is_shut_out_does_not_take_the_others_along(on_nodes: OnNodes):
    on_nodes.node("n", "--workers=2")
    on_nodes.run.until_step(2)
    command = [sys.executable, "-m", "offbeat", "worker", "revoke", str(on_nodes.run.run), "n-1"]
    subprocess.run(command, env={**os.environ, **on_nodes.run.environment}, check=True, capture_output=True)
    until(lambda: "the others go on" in on_nodes.said("n"), "the node to say so")
    assert on_nodes.run.finish() == ""
    assert on_nodes.nodes[0].wait(60) == 0
