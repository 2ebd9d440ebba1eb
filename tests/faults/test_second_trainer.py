"""A second trainer at a run that is being trained: real processes, one of which has to give way."""

import json
import os
import subprocess
import sys

import pytest
from supervised_runs import TINY

from benchmarks.common.supervised import MARK, PACED, WITHIN_S, Supervised
from offbeat.ledger.ledger import Ledger

OVERLAP = ("--schedule.mode=overlap", "--schedule.max-staleness=2", "--rollout.workers=1")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_one_without_a_checkpoint_is_sent_away_and_one_told_to_begin_from_scratch_takes_over(tmp_path):
    run = Supervised(tmp_path, *TINY, *PACED, *OVERLAP, "--run.steps=5000", "--checkpoint.every=1")
    others: list[subprocess.Popen[str]] = []

    def second(*words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, **run.environment, MARK: "another"}
        offbeat = [sys.executable, "-m", "offbeat"]
        token = subprocess.run(
            [*offbeat, "worker", "token", str(run.run), "--role", "trainer"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        url = json.loads((run.run / "serve.json").read_text())["near_url"]
        others.append(
            subprocess.Popen(
                [*offbeat, "trainer", "--join", url, "--name", "second", "--dir", str(tmp_path / "second"), *words],
                env={**environment, "OFFBEAT_TOKEN": token},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return others[-1]

    try:
        run.until_step(2)
        refused = second()
        _, errors = refused.communicate(timeout=WITHIN_S)
        assert refused.returncode == 2
        assert errors.count("\n") == 1
        assert "no checkpoint; start it with --dir and the folder of the previous trainer (trainer on " in errors
        assert "--from-scratch" in errors
        with Ledger(run.run / "ledger.sqlite", read_only=True) as ledger:
            step = ledger.latest_version().step
            assert ledger.report().num_abandoned_versions == 0, "nothing was undone"
        run.until_step(step + 2)

        daring = second("--from-scratch")
        told = run.finish(status=1)  # its own trainer was replaced, and to start it again would replace the other
        assert "trainer: ended with status 3" in told
        assert "another trainer has taken over this run: second on " in told
        with Ledger(run.run / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.report().num_abandoned_versions > 0
            assert ledger.verify().violations == ()
        assert daring.poll() is None, "it waits for the coordinator"
    finally:
        run.end()
        for process in others:
            process.kill()
            process.wait()
