"""A run on a Ray cluster of two classes: roles stand where they should; a node dies, another joins, it ends whole."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import PACED, rows, until
from offbeat.cli.main import main
from offbeat.launch.ray_cluster import LABEL, find_machines

STORE_BYTES = 80 * 2**20


class ListedNodes:
    """What `ray.nodes()` returns, as Ray 2.49 words it."""

    def __init__(self, *nodes: dict[str, Any]):
        self._nodes = nodes

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeManagerHostname": "box", "Labels": {}, **node} for node in self._nodes]


def test_classes_are_labels_and_heads_and_dead_nodes_do_not_count():
    gpu = {"CPU": 16.0, "GPU": 8.0}
    found = find_machines(
        ListedNodes(
            {"NodeID": "a" * 8, "Resources": gpu, "Labels": {LABEL: "h20", "ray.io/accelerator-type": "H20"}},
            {"NodeID": "b" * 8, "Resources": gpu, "Labels": {"ray.io/accelerator-type": "H800"}},
            {"NodeID": "c" * 8, "Resources": gpu, "Alive": False},
            {"NodeID": "d" * 8, "Resources": {"memory": 1.0}},
            {"NodeID": "e" * 8, "Resources": {"CPU": 4.0}},
        )
    )
    kinds = {identifier[0]: (machine.kind, machine.num_gpus) for identifier, machine in found.items()}
    assert kinds == {"a": ("h20", 8), "b": ("H800", 8), "e": ("cpu", 0)}


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_one_line_says_what_to_install(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--on", "ray", "--run.steps=1"]) == 2
    said = capsys.readouterr().err
    assert said == "offbeat: --on ray: the package ray is not installed here; pip install ray on every node\n"


@pytest.fixture
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def add(cluster: Any, kind: str, num_gpus: int) -> Any:
    store = {"object_store_memory": STORE_BYTES}
    return cluster.add_node(num_cpus=1, num_gpus=num_gpus, labels={LABEL: kind}, **store)


def train(cluster: Any, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    environment |= {"OFFBEAT_SCRATCH": str(folder / "scratch")}
    with (folder / "said").open("wb") as said:
        command = [sys.executable, "-m", "offbeat", "train", *TINY, *PACED, *words, "--on=ray"]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_a_node_dies_and_another_joins_and_the_run_ends_whole(cluster: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    add(cluster, "h800", 2)
    lost = add(cluster, "h20", 1)
    refused = train(cluster, tmp_path, "--nodes=h20:3")
    assert refused.wait(120) == 2
    assert "--nodes h20:3: the cluster has 1 node of h20" in (tmp_path / "said").read_text()
    overlap = ("--schedule.mode=overlap", "--schedule.max-staleness=2", "--run.steps=200", "--paced.base-s=0.05")
    run = train(cluster, tmp_path, *overlap)
    try:
        file = tmp_path / "runs" / "a" / "metrics.jsonl"
        until(lambda: run.poll() is not None or len(rows(file)) > 10, "ten steps")
        cluster.remove_node(lost, allow_graceful=False)
        add(cluster, "h20", 1)
        assert run.wait(300) == 0, (tmp_path / "said").read_text()
    finally:
        run.kill()
        run.wait()
    said = (tmp_path / "said").read_text()
    assert "(h20) is lost; the others carry on" in said
    assert "(h20) has joined the cluster: 1 more" in said
    check_whole(tmp_path / "runs" / "a", 200)
    told = subprocess.run(
        [sys.executable, "-m", "offbeat", "worker", "list", "runs/a", "--json"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert len([one for one in json.loads(told.stdout) if one["role"] == "rollout"]) == 3
