"""Trains a job with TRL, in a process of its own and its own environment."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.runs import Job, Run, checked, read_rows, run_command
from offbeat.model.loading import resolve

SCRIPT = Path(__file__).with_name("trl_grpo.py")
OFFBEATS_OWN = ("save_every", "trl", "schedule", "max_staleness", "loss", "task", "rollout", "threads", "beta2")
"""Fields of a job that TRL's script does not read."""


def train_with_trl(job: Job, folder: Path, python: Path) -> Run:
    folder.mkdir(parents=True)
    rows = folder / "rows.jsonl"
    spec = {key: value for key, value in asdict(job).items() if key not in OFFBEATS_OWN}
    spec |= {
        "model": str(resolve(job.model)),
        "save_at": job.save_at,
        "settings": {key: value for key, value in job.trl.items() if key != "environment"},
        "rows": str(rows),
        "weights": str(folder / "weights"),
        "scratch": str(folder / "scratch"),
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    others_share = run_command(
        [str(python), str(SCRIPT), str(folder / "spec.json")], folder, job.trl.get("environment")
    )
    return checked(Run("trl", job, read_rows(rows), folder, others_share))
