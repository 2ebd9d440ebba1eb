"""Settings of tiny supervised runs, and what must hold once they have ended."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from offbeat.ledger.ledger import Ledger

TINY = (
    *("--run.name=a", "--run.seed=3", "--batch.groups-per-step=2", "--batch.group-size=4", "--optimizer.lr=3e-4"),
    *("--rollout.max-new-tokens=8", "--rollout.slots=16", "--rollout.lease-s=4", "--eval.every=0", "--run.threads=1"),
    *("--log.console=quiet", "--rollout.max-attempts=20"),  # on busy cores a lease may end before its worker is heard
)


def final_digest(run: Path) -> str:
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        version = ledger.latest_version()
    assert version is not None
    return version.digest


def check_whole(run: Path, num_steps: int, groups_per_step: int = 2) -> None:
    """The run is finished; every step was trained once, on groups of its own; none was forgotten on the way."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
    connection = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    trained = connection.execute("SELECT step FROM batches WHERE state = 'trained' ORDER BY step").fetchall()
    members = connection.execute(
        "SELECT m.task FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.state = 'trained'"
    ).fetchall()
    ordinals = connection.execute(
        "SELECT ordinal FROM groups WHERE state = 'trained' AND purpose = 'train' ORDER BY ordinal"
    ).fetchall()
    drawn = {ordinal for (ordinal,) in connection.execute("SELECT ordinal FROM groups WHERE purpose = 'train'")}
    connection.close()
    assert [step for (step,) in trained] == list(range(num_steps))
    assert len(members) == len(set(members))
    assert len(ordinals) == len(set(ordinals)) == num_steps * groups_per_step
    assert drawn == set(range(len(drawn))), "an ordinal was left out"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, num_steps)


def check_figures(run: Path) -> None:
    """No time is negative, and the trace is JSON with everybody's work."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row[name] >= 0 for row in rows for name in row if name.startswith("time_"))
    assert {row["workers"] for row in rows if "reward" in row} <= {0, 1, 2}
    events = json.loads((run / "trace.json").read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = {(names[event["tid"]], event["name"]) for event in events if event["ph"] == "X"}
    assert spans >= {("trainer", "train"), ("worker worker-1", "generate"), ("rewards", "reward")}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
