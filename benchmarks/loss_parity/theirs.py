"""Runs cases through TRL, all in one process of TRL's environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loss_parity.cases import Answer
from benchmarks.loss_parity.ours import Outcome
from benchmarks.report import REPOSITORY
from offbeat.errors import DeadlineError, OffbeatError
from offbeat.model.loading import resolve

SCRIPT = Path(__file__).with_name("trl_loss.py")
RUN_WITHIN_S = 900.0


@dataclass(frozen=True)
class Job:
    """A batch for TRL, split into equal parts with one update each."""

    settings: Mapping[str, Any]
    """Fields of TRL's GRPOConfig."""
    answers: Sequence[Answer]
    is_corrected: bool = False
    num_parts: int = 1

    def spec(self) -> dict[str, Any]:
        groups = [answer.group for answer in self.answers]
        return {
            "settings": dict(self.settings),
            "group_size": groups.count(groups[0]),
            "is_corrected": self.is_corrected,
            "num_parts": self.num_parts,
            "answers": [
                {name: _plain(value) for name, value in vars(answer).items() if name != "group"}
                for answer in self.answers
            ],
        }


def outcomes(jobs: Sequence[Job], python: Path) -> tuple[str, list[list[Outcome]]]:
    """Returns TRL's version, and for each job the outcomes of its updates."""
    with tempfile.TemporaryDirectory(prefix="loss_parity-") as scratch:
        spec, result = Path(scratch) / "spec.json", Path(scratch) / "result.json"
        asked = {"model": str(resolve("offbeat-tiny")), "scratch": scratch, "jobs": [job.spec() for job in jobs]}
        spec.write_text(json.dumps(asked))
        command = [str(python), str(SCRIPT), str(spec), str(result)]
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=RUN_WITHIN_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"TRL's losses: not done after {RUN_WITHIN_S:.0f} s") from error
        if done.returncode:
            raise OffbeatError(f"TRL's losses: exit status {done.returncode}\n{done.stderr[-2000:]}")
        told = json.loads(result.read_text())
    return told["version"], [[read(update) for update in updates] for updates in told["results"]]


def read(update: Mapping[str, Any]) -> Outcome:
    """Returns the outcome of an update as recorded in a file."""
    gradients = [np.array(row) for row in update["gradients"]]
    return Outcome(update["loss"], gradients, np.array(update["advantages"]))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
