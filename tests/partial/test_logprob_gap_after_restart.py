"""Bug class 13: after a restart, engine and trainer disagree about fresh tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import pytest
from partial_scenes import until
from torch import Tensor

import offbeat
from offbeat.engines.embedded.stepper import Stepper
from offbeat.engines.protocol import Generation
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Counts
from offbeat.observability.metric_files import read_metrics
from offbeat.trainer.trainer import Trainer
from offbeat.weights.version import Version

TOLERANCE = 1e-5
SAVED_AT = 2
GROUPS_PER_STEP = 3


class Killed(Exception):
    pass


@pytest.mark.full
def test_engine_and_trainer_agree_about_fresh_tokens_after_a_restart_as_they_did_before(tmp_path, monkeypatch):
    """A trainer dies with beginnings in the ledger, which are carried on with the weights of its last checkpoint."""
    run, write_version, step = tmp_path / "run", Trainer._write_version, Stepper.step

    def counts() -> Counts:
        with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
            report = ledger.verify()
            assert report.violations == ()
            return report.counts

    num_waits = 0

    def step_while_it_is_wanted(stepper: Stepper) -> list[Generation]:
        """However slow rewards are: none while answers wait for them, or the batch may be complete. So some are cut. A
        batch may wait all the same, for a group whose last chance it is: then it goes on."""
        nonlocal num_waits
        if not stepper.is_idle and num_waits < 50:
            with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
                is_wanted = not ledger.unscored(1) and ledger.counts().groups.get("ready", 0) < GROUPS_PER_STEP
            if not is_wanted:
                num_waits += 1
                time.sleep(0.005)
                return []
        num_waits = 0
        return step(stepper)

    def has_no_lease() -> bool:
        with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
            return not ledger.leased()

    async def die(trainer: Trainer, number: int, parent: int | None, weights: Mapping[str, Tensor]) -> Version:
        if number > SAVED_AT + 1:
            await until(has_no_lease, "the end of the round")
            if counts().tokens.partial:
                raise Killed
        return await write_version(trainer, number, parent, weights)

    config = {
        "run": {"dir": str(tmp_path), "name": "run", "steps": 4 * SAVED_AT, "threads": 1},
        "batch": {"groups_per_step": GROUPS_PER_STEP, "group_size": 3},
        "schedule": {"max_staleness": 3, "over_provision": 3.0},
        "rollout": {"max_new_tokens": 24, "slots": 32},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every": SAVED_AT, "keep": 9},
        "eval": {"every": 0},
        "log": {"console": "quiet"},
    }
    monkeypatch.setattr(Stepper, "step", step_while_it_is_wanted)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_write_version", die)
        with pytest.raises(Killed):
            offbeat.train(config)
    offbeat.train(config, resume=run)
    assert counts().max_staleness_trained > 0, "nothing was carried on"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row.get("logprob_gap") is not None]
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    (resumed,) = [event for event in events if event["event"] == "resume"]
    before = [row["logprob_gap"] for row in rows if row["step"] <= resumed["step"]]
    after = [row["logprob_gap"] for row in rows if row["step"] > resumed["step"]]
    assert before
    assert after
    assert max(after) <= max(before) + TOLERANCE
