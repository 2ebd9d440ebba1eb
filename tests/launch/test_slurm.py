"""A run as a Slurm job: what Slurm knows is read right, the script is sound, and on a real Slurm the run ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from supervised_runs import TINY, check_whole

from benchmarks.common.supervised import PACED, rows, until
from offbeat.config import load
from offbeat.errors import UserError
from offbeat.launch import slurm
from offbeat.launch.cluster import Machine, place

NODES = [Machine("h800-1", "h800", 2, 8), Machine("h800-2", "h800", 2, 8), Machine("h20-1", "h20", 1, 4)]
Command = Callable[[str, str], None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts a command of Slurm first on the path: an executable with this text."""

    def put(name: str, text: str) -> None:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return put


def job(folder: Path, machines=NODES, *words: str, options: tuple[str, ...] = ()) -> slurm.Job:
    placed = place(machines, load(None, words))
    return slurm.Job("a", folder / "jobs" / "a", folder / "runs" / "a", placed, ["x.toml"], (), options)


def test_classes_are_types_of_gpus_or_features_and_only_usable_nodes_of_the_partition_count(command: Command):
    lines = [
        "h20-1|h20,ib|gpu:h20:8(S:0-1)|192|idle|gpu*",
        "h20-2|h20,ib|gpu:h20:8|192|mixed|gpu*",
        "h20-3|h20,ib|gpu:h20:8|192|down*|gpu*",
        "h20-4|h20,ib|gpu:h20:8|192|idle*|gpu*",
        "old-1|(null)|gpu:4|32+|drained|gpu*",
        "old-2|(null)|gpu:4|32+|allocated|gpu*",
        "thin-1|thin|(null)|64|idle|gpu*",
        "else-1|h20|gpu:h20:8|64|idle|other",
        "h20-1|h20,ib|gpu:h20:8|192|idle|also*",
    ]
    command("sinfo", f"cat <<'END'\n{chr(10).join(lines)}\nEND")
    found = slurm.find_machines(None)
    assert found.machines == (
        Machine("h20-1", "h20", 8, 192),
        Machine("h20-2", "h20", 8, 192),
        Machine("old-2", "cpu", 4, 32),
        Machine("thin-1", "thin", 0, 64),
    )
    assert found.idle == ("h20-1", "thin-1")


def test_what_slurm_refuses_is_passed_on_in_one_line(command: Command, monkeypatch):
    command("sinfo", "echo 'sinfo: error: no such partition'; exit 1")
    with pytest.raises(UserError, match="--on slurm: sinfo refuses: sinfo: error: no such partition"):
        slurm.find_machines("nope")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no sinfo here; run this on a login node"):
        slurm.find_machines(None)


def test_the_job_has_a_component_for_each_class_and_a_step_for_each_node(tmp_path: Path):
    text = slurm.script(job(tmp_path, options=("--time=8:00:00",)))
    assert text.count("#SBATCH hetjob") == 1
    assert text.count("#SBATCH --time=8:00:00") == 2
    assert "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=8\n#SBATCH --no-kill --no-requeue" in text
    assert "--gpus-per-node=h800:2" in text
    assert "--on local --workers-here 1" in text, "a GPU of the training node is left for a worker"
    assert "--workers 2" in text
    assert "--workers 1" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_cluster_of_one_class_is_a_plain_job(tmp_path: Path):
    text = slurm.script(job(tmp_path, NODES[:2]))
    assert "het" not in text
    assert "#SBATCH --no-kill --requeue" in text


def test_words_with_spaces_stay_one_word(tmp_path: Path):
    (tmp_path / "my runs").mkdir()
    text = slurm.script(job(tmp_path / "my runs"))
    assert f"if [ -f '{tmp_path}/my runs/runs/a/config.json' ]" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.full
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_shellcheck_has_nothing_to_say(tmp_path: Path, num_nodes: int):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    text = slurm.script(job(tmp_path, NODES[:num_nodes]))
    said = subprocess.run(["shellcheck", "-s", "bash", "-"], input=text, text=True, capture_output=True, check=False)
    assert said.stdout == ""


class OnSlurm:
    """A run on the Slurm that `SLURM_CONF` names, as its user starts it."""

    def __init__(self, folder: Path, *words: str):
        self.folder, self.run = folder, folder / "runs" / "a"
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "train", *words],
                cwd=folder,
                env=environment,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def end(self) -> None:
        """Stops following, and ends the job if it still runs."""
        self.process.kill()
        self.process.wait()
        subprocess.run(["scancel", "--name=offbeat-a"], check=False)

    def until_step(self, step: int) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.said
            return any(row["step"] >= step for row in rows(self.run / "metrics.jsonl") if "reward" in row)

        until(is_there, f"step {step}")


def slurm_says(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def nodes() -> list[str]:
    """The nodes of a Slurm of two classes of two nodes, all idle."""
    if shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ:
        pytest.skip("no Slurm is running: SLURM_CONF names its configuration")
    lines = slurm_says("sinfo", "-h", "-N", "-o", "%N %T").split()
    if lines[1::2].count("idle") < 4:
        pytest.skip(f"four idle nodes are needed: {lines}")
    return lines[::2]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_rollout_node_goes_down_and_one_joins_from_outside_the_job_and_the_run_ends_whole(
    tmp_path: Path, nodes: list[str]
):
    down = sorted(name for name in nodes if name.startswith("h20"))[0]
    words = (*TINY, *PACED, "--schedule.mode=overlap", "--schedule.max-staleness=2", "--log.console=plain")
    run = OnSlurm(tmp_path, *words, "--run.steps=200", "--on=slurm")
    try:
        run.until_step(5)
        slurm_says("scontrol", "update", f"nodename={down}", "state=down", "reason=test")
        join = [sys.executable, "-m", "offbeat", "node", "--join-file", str(tmp_path / "jobs" / "a" / "join.json")]
        joined = subprocess.Popen(
            ["srun", f"--nodelist={down}", *join, "--name=late", f"--dir={tmp_path / 'late'}"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.DEVNULL,
        )
        assert run.process.wait(300) == 0, run.said
        assert joined.wait(60) == 0
    finally:
        run.end()
    check_whole(run.run, 200)
    lines = run.said.splitlines()
    assert lines[0] == "trains       1 node of h800: coordinator and 1 trainer rank, on 1 of 2 GPUs"
    assert lines[1] == "rolls out    5 workers: 3 on 2 nodes of h800, 2 on 2 nodes of h20"
    assert "Requeuing" not in run.said
    told = subprocess.run(
        [sys.executable, "-m", "offbeat", "ledger", "show", str(run.run), "--json"], capture_output=True, text=True
    )
    producers = {one["worker"] for one in json.loads(told.stdout)["producers"] if one["num_trajectories"]}
    assert {"late-1", f"{down}-1", "h800-2-1", "h800-2-2"} <= producers


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_training_node_goes_down_and_the_run_is_resumed_by_another_job(tmp_path: Path, nodes: list[str]):
    words = (*TINY, *PACED, "--schedule.mode=overlap", "--schedule.max-staleness=2", "--checkpoint.every=5")
    run = OnSlurm(tmp_path, *words, "--run.steps=60", "--on=slurm", "--nodes=h800:1", "--nodes=h20:1")
    try:
        run.until_step(10)
        (trains,) = {slurm_says("squeue", "-h", "-n", "offbeat-a", "-o", "%B").split()[0]}
        slurm_says("scontrol", "update", f"nodename={trains}", "state=down", "reason=test")
        assert run.process.wait(300) == 0, run.said
    finally:
        run.end()
    assert "because a node failed; submitted again as" in run.said
    check_whole(run.run, 60)


@pytest.mark.full
def test_what_a_real_slurm_lacks_is_refused_within_ten_seconds(tmp_path: Path, nodes: list[str]):
    begun_s = time.monotonic()
    run = OnSlurm(tmp_path, *TINY, "--on=slurm", "--nodes=h20:3")
    assert run.process.wait(60) == 2
    assert "--nodes h20:3: the cluster has 2 nodes of h20" in run.said
    assert time.monotonic() - begun_s < 10
    assert not (tmp_path / "jobs").exists()
