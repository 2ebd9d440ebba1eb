"""Trains one run with one system (Offbeat or TRL), in a process of its own, and reads its output.

Both systems get the same `Job`. A run's rows have `step`, `samples`, `seconds` (of the whole step: generation, rewards,
training and everything in between, but not saving weights) and `reward`; the job says at which steps weights are kept.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.report import REPOSITORY
from offbeat.errors import DeadlineError, OffbeatError
from offbeat.trainer.checkpoint import Checkpoints

RUN_WITHIN_S = 3600.0
LOG_LINES = 20
PROC_STAT = Path("/proc/stat")
TRL_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
MASTER = "master."
"""Prefix of the names of weights in Offbeat's checkpoints; on a CPU these are the published weights."""


@dataclass(frozen=True)
class Job:
    """Settings of a run, the same for both systems."""

    seed: int
    steps: int
    tail: float
    max_new_tokens: int
    model: str = "offbeat-tiny"
    level: int = 2
    groups_per_step: int = 32
    group_size: int = 8
    lr: float = 3e-4
    beta2: float = 0.999
    schedule: str = "alternate"
    """This setting and the next five are for Offbeat only."""
    max_staleness: int | None = None
    loss: str = "grpo"
    task: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the arithmetic task."""
    rollout: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the section `rollout`."""
    threads: int | None = None
    save_every: int = 0
    """Number of steps after which weights are kept each time; 0: never."""
    trl: Mapping[str, Any] = field(default_factory=dict)
    """Settings of TRL (see trl_grpo.py), and environment variables of its process under `environment`."""

    @property
    def save_at(self) -> list[int]:
        return list(range(self.save_every, self.steps + 1, self.save_every)) if self.save_every else []

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size


@dataclass(frozen=True)
class Run:
    """A finished job."""

    system: str
    job: Job
    rows: Sequence[Mapping[str, float]]
    folder: Path
    others_share: float
    """Share of the machine's cores that other processes used during the run."""

    def samples_per_second(self, num_warmup: int) -> float:
        rows = self.rows[num_warmup:]
        return sum(row["samples"] for row in rows) / sum(row["seconds"] for row in rows)

    def step_quartiles_s(self, num_warmup: int) -> tuple[float, float]:
        """First and third quartile of the seconds of a step; of a few steps, the fastest and the slowest."""
        seconds = sorted(row["seconds"] for row in self.rows[num_warmup:])
        edge = len(seconds) // 4
        return seconds[edge], seconds[-1 - edge]

    def weights(self, step: int) -> dict[str, Tensor]:
        """Returns the weights after a step, which must be one at which the job kept weights."""
        if self.system == "trl":
            return load_file(self.folder / "weights" / f"{step:08d}" / "model.safetensors")
        _, tensors = Checkpoints(self.folder / "run" / "checkpoints").load(step)
        return {name.removeprefix(MASTER): tensor for name, tensor in tensors.items() if name.startswith(MASTER)}


def train_with_offbeat(job: Job, folder: Path) -> Run:
    """Trains with Offbeat's command line, as a user would. Evaluation is off, because the benchmark judges both systems
    itself."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(_toml(job, folder))
    others_share = run_command([sys.executable, "-m", "offbeat", "train", str(folder / "run.toml")], folder)
    rows = [_without_saving(row) for row in read_rows(folder / "run" / "metrics.jsonl") if "reward" in row]
    return checked(Run("offbeat", job, rows, folder, others_share))


def _toml(job: Job, folder: Path) -> str:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder), "seed": job.seed, "steps": job.steps} | _given(threads=job.threads),
        "model": {"path": job.model, "dtype": "float32", "device": "cpu"},
        "batch": {"groups_per_step": job.groups_per_step, "group_size": job.group_size},
        "rollout": {"temperature": 1.0, "max_new_tokens": job.max_new_tokens, **job.rollout},
        "optimizer": {
            "lr": job.lr,
            "schedule": "constant",
            "beta2": job.beta2,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
        },
        "loss": {"name": job.loss, **(TRL_CLIP if job.loss == "grpo" else {}), "kl_coef": 0.0},
        "schedule": {"mode": job.schedule} | _given(max_staleness=job.max_staleness),
        "eval": {"every": 0},
        "checkpoint": {"every": job.save_every, "keep": max(len(job.save_at), 1)},
        "log": {"console": "quiet"},
        "[task]": {"source": "arithmetic", "level": job.level, "tail": job.tail, **job.task},
    }
    # A TOML value of these types is written as in JSON.
    return "\n\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())])
        for name, keys in sections.items()
    )


def _given(**keys: Any) -> dict[str, Any]:
    """Returns the keys whose value is set."""
    return {key: value for key, value in keys.items() if value is not None}


def run_command(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> float:
    """Runs a command to its end; returns the share of the machine's cores that other processes used meanwhile."""
    log = folder / "log.txt"
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1", **(environment or {})}
    start_s, start_others_s = time.monotonic(), _others_cpu_s()
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, stdout=out, stderr=out, timeout=RUN_WITHIN_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{' '.join(command)}: not done after {RUN_WITHIN_S:.0f} s") from error
    if done.returncode:
        end = "\n".join(log.read_text().splitlines()[-LOG_LINES:])
        raise OffbeatError(f"{' '.join(command)}: exit status {done.returncode}\n{end}")
    used_s = (time.monotonic() - start_s) * (os.cpu_count() or 1)
    return max(_others_cpu_s() - start_others_s, 0.0) / used_s


def python_path(python: str) -> dict[str, str]:
    """Returns PYTHONPATH for an interpreter: this project's, and for our own interpreter also what it sees itself."""
    project = [str(REPOSITORY / "src"), str(REPOSITORY)]
    return {"PYTHONPATH": ":".join([*project, *(sys.path if python == sys.executable else [])])}


def _others_cpu_s() -> float:
    """Returns the CPU seconds used so far by anything but our finished child processes; 0 without /proc/stat."""
    if not PROC_STAT.is_file():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, PROC_STAT.read_text().split()[1:9])
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy_s - ours.ru_utime - ours.ru_stime


def read_rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _without_saving(row: Mapping[str, float]) -> dict[str, float]:
    """Returns a step's row without the time of its checkpoint, because neither system's time includes saving
    weights."""
    return {**row, "seconds": row["seconds"] - row.get("time_checkpoint_s", 0.0)}


def checked(run: Run) -> Run:
    """Returns the run; raises if it did not train what the job asked for, because its figures then mean nothing."""
    samples = run.job.samples_per_step
    steps = [int(row["step"]) for row in run.rows]
    if steps != list(range(1, run.job.steps + 1)) or any(row["samples"] != samples for row in run.rows):
        raise OffbeatError(f"{run.system}: trained steps {steps}, not {run.job.steps} of {samples} samples")
    return run
