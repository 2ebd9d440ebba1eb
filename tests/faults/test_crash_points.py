"""Whoever dies at a named place, the run gets past it and ends in the very weights of one that was left alone.

The processes of one role die at each of their places in turn, within one run. Equal weights say more than any sum:
nothing was lost, nothing trained twice, nothing drawn anew.
"""

import os

import pytest
from shared_results import shared
from supervised_runs import TINY, check_whole, final_digest

from benchmarks.common.supervised import Supervised, rows
from offbeat.testing import crash_points

pytestmark = pytest.mark.full
NUM_STEPS = 4
EXACT = (*TINY, "--run.exact=true", f"--run.steps={NUM_STEPS}", "--checkpoint.every=2")
JUDGED = ("--eval.every=2", "--eval.prompts=2", "--eval.samples=1")
NEEDS = {"coordinator": 2, "trainer": 1, "worker": 1}
"""Worker processes: while the coordinator is away, two race for what it has forgotten."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    def train() -> str:
        run = Supervised(tmp_path_factory.mktemp("calm"), *EXACT, *JUDGED)
        assert run.finish() == ""
        return final_digest(run.run)

    return shared(tmp_path_factory, "calm", train)


@pytest.fixture(scope="module", params=list(NEEDS))
def stormy(request, tmp_path_factory) -> tuple[str, Supervised]:
    folder = tmp_path_factory.mktemp(request.param)
    witnesses = folder / "witnesses"
    witnesses.mkdir()
    crashes = {crash_points.AT: ",".join(crash_points.POINTS[request.param]), crash_points.ONCE: os.fspath(witnesses)}
    run = Supervised(folder, *EXACT, *JUDGED, f"--rollout.workers={NEEDS[request.param]}", environment=crashes)
    assert run.finish() == ""
    return request.param, run


@pytest.mark.timeout(600)
def test_a_run_gets_past_the_death_of_a_role_at_each_of_its_places(stormy, calm):
    role, run = stormy
    died = {file.name for file in (run.folder / "witnesses").iterdir()}
    assert died == set(crash_points.POINTS[role])
    killed = [row for row in run.diary() if row.get("status") == -9 and row["process"].startswith(role)]
    assert len(killed) >= len(died)
    check_whole(run.run, NUM_STEPS)
    assert final_digest(run.run) == calm
    judged = [row["step"] for row in rows(run.run / "metrics.jsonl") if "eval_prompts" in row]
    assert sorted(set(judged)) == [0, 2, 4]
