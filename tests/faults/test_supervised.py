"""A supervised run goes on by itself when its processes are killed, and takes them along when it ends itself."""

import json
import re
import shutil
import signal
from collections import Counter

import pytest
from supervised_runs import TINY, check_figures, check_whole

from benchmarks.common.supervised import PACED, Supervised, rows, until
from offbeat.model.loading import TINY_FOLDER
from offbeat.trainer.checkpoint import Checkpoints

OVERLAP = ("--schedule.mode=overlap", "--schedule.max-staleness=2", "--rollout.workers=2")
ROUNDS = ("--schedule.mode=alternate", "--schedule.max-staleness=2", "--rollout.workers=2", "--rollout.slots=4")


@pytest.mark.timeout(400)
@pytest.mark.full
@pytest.mark.parametrize("schedule", [OVERLAP, ROUNDS], ids=["overlap", "rounds"])
def test_a_run_whose_every_process_is_killed_in_turn_finishes_by_itself(tmp_path, schedule):
    killed = ["worker-1", "coordinator", "worker-2", "trainer", "coordinator"]
    num_steps = 12
    run = Supervised(tmp_path, *TINY, *PACED, *schedule, f"--run.steps={num_steps}", "--checkpoint.every=3")
    for step, name in enumerate(killed, start=1):
        run.until_step(step)
        run.kill(name)
    run.kill("coordinator")  # it was just about to start again
    assert run.finish() == ""
    check_whole(run.run, num_steps)
    check_figures(run.run)
    ends = Counter(row["process"] for row in run.diary() if row.get("status") == -signal.SIGKILL)
    assert ends >= Counter([*killed, "coordinator"])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_killing_the_supervisor_leaves_nobody_behind_and_the_run_can_be_resumed(tmp_path):
    run = Supervised(tmp_path, *TINY, *PACED, *OVERLAP, "--run.steps=500", "--checkpoint.every=1")
    run.until_step(2)
    run.process.kill()
    run.process.wait()
    assert len(run.living()) >= 4, "nobody was there to be left behind"
    until(lambda: not run.living(), "orphans to end", 30.0)

    steps = Checkpoints(run.run / "checkpoints").steps()[-1] + 3
    again = Supervised(tmp_path, "--resume", "runs/a", f"--run.steps={steps}")
    assert again.finish() == ""
    check_whole(again.run, steps)


@pytest.mark.timeout(400)
def test_ctrl_c_ends_with_a_checkpoint_a_summary_and_its_status(tmp_path):
    run = Supervised(tmp_path, *TINY, *PACED, *OVERLAP, "--run.steps=500")
    run.until_step(2)
    run.process.send_signal(signal.SIGINT)
    told = run.finish(status=130)
    (step,) = re.fullmatch(r"offbeat: stopped by SIGINT after step (\d+), with a checkpoint; .*runs/a\n", told).groups()
    summary = json.loads((run.run / "summary.json").read_text())
    assert (summary["finished"], summary["stopped_by"], summary["steps"]) == (False, "SIGINT", int(step))
    assert Checkpoints(run.run / "checkpoints").steps() == [int(step)]
    check_figures(run.run)
    assert all(row["status"] == 0 for row in run.diary() if row["process"] == "worker-1" and row["event"] == "ended")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_what_the_user_must_mend_ends_the_run_with_one_line(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY_FOLDER, model)
    run = Supervised(tmp_path, *TINY, *PACED, *OVERLAP, "--run.steps=500", f"--model.path={model}")
    run.until_step(1)
    shutil.rmtree(model)
    run.kill("trainer")
    told = run.finish(status=1)
    line = r"offbeat: trainer: ended with status 2 and is not restarted: .*: model\.path = .*trainer\.log\)\n"
    assert re.fullmatch(line, told), told
    starts = [row for row in run.diary() if row["process"] == "trainer" and row["event"] == "started"]
    assert len(starts) == 2, "it was started again in vain"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_coordinator_killed_when_the_trainer_is_done_still_ends_the_run(tmp_path):
    judging = ("--eval.every=2", "--eval.prompts=4", "--eval.samples=1", "--paced.base-s=0.3")
    run = Supervised(tmp_path, *TINY, *PACED, *judging, "--rollout.workers=1", "--run.steps=2")
    ended = {"process": "trainer", "status": 0}
    until(lambda: any(row.items() >= ended.items() for row in run.diary()), "the trainer's end")
    run.kill("coordinator")  # the last weights are being judged
    assert run.finish() == ""
    check_whole(run.run, 2)
    judged = [row["step"] for row in rows(run.run / "metrics.jsonl") if "eval_prompts" in row]
    assert judged == [0, 2], "an evaluation was forgotten, or told twice"
