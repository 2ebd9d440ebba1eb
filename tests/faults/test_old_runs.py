"""Runs that an older Offbeat made go on with this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from old_run_folders import unpack

WITHIN_S = 240


def offbeat(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "offbeat", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, num_steps", [("alone", 7), ("swarm", 6)])
def test_an_old_run_goes_on_for_two_steps_and_its_ledger_holds(tmp_path, name, num_steps):
    folder = unpack(tmp_path)
    run = folder / "runs" / name
    offbeat(folder, "train", "--resume", f"runs/{name}", f"--run.steps={num_steps}", "--log.console=quiet")
    assert "everything holds" in offbeat(folder, "ledger", "verify", f"runs/{name}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["attempt"] > 1 and "reward" in row][-1] == num_steps
    stored = json.loads((run / "config.json").read_text())
    assert ("top_p" in stored["rollout"], stored["run"]["steps"]) == (False, num_steps)
