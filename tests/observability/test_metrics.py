"""What a run tells of its steps: rows from finished batches, alarms from events, and the summary at the end."""

import importlib.util
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from offbeat.config import load
from offbeat.launch.run_folder import RunFolder
from offbeat.ledger.records import Batch, BatchGroup, Counts, EvalGroup, EvalRound, GroupState, Member
from offbeat.observability import metrics
from offbeat.observability.console import PlainConsole
from offbeat.observability.metrics import Reporter, eval_figures, step_row, summarise
from offbeat.trainer.step import StepMetrics
from offbeat.trainer.trainer import StepReport
from offbeat.trajectory import End, Reward, Segment, Trajectory
from offbeat.weights.encoding import Coding
from offbeat.weights.manifest import Kind
from offbeat.weights.publish import PublishFigures

METRICS = StepMetrics(
    **{"loss": 0.1, "grad_norm": 1.0, "clip_share": 0.0, "kept_share": 1.0, "kl": 0.0, "ess": 1.0, "logprob_gap": 0.0},
    **{"clamped_share": 0.0, "entropy": 0.5, "num_trained_tokens": 6, "num_row_tokens": 8, "num_microbatches": 1},
    signal_share=1.0,
)


class Sink:
    def __init__(self, error: OSError | None = None):
        self.rows: list[dict] = []
        self.error = error

    def log(self, row) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append(dict(row))

    def close(self) -> None: ...


@pytest.fixture
def reporter(tmp_path):
    with RunFolder.create(load(None, [f"--run.dir={tmp_path}", "--run.name=a"])) as folder:
        yield Reporter(folder, PlainConsole(10, io.StringIO()), [])


def member(num_tokens: int, reward: float, staleness: int = 0, parts=(), end: End = End.STOP) -> Member:
    trajectory = Trajectory(1, [1], 9)
    trajectory.append(Segment(0, [5] * num_tokens, logprobs=[-0.5] * num_tokens, version=0, kv_version=0), end)
    rewards = tuple(Reward(value, name) for name, value in parts) or (Reward(reward),)
    return Member(1, 0, trajectory, rewards, reward, np.full(num_tokens, staleness))


def group(*members: Member, source: str = "a", prompt: int | None = None, earlier=()) -> BatchGroup:
    return BatchGroup(1, 0, source, members, prompt, earlier)


def row_of(*groups: BatchGroup, num_siblings: int = 1, weights: PublishFigures | None = None) -> dict:
    report = StepReport(2, Batch(2, 2, groups, num_no_signal=3), METRICS, lr=0.01, weights=weights)
    return step_row(report, {"train": 0.25}, num_siblings)


def test_a_row_has_the_figures_of_its_batch():
    row = row_of(group(member(2, 1.0), member(4, 0.0, staleness=2, end=End.LENGTH)))
    expected = {"step": 3, "reward": 0.5, "reward_std": 0.5, "length": 3.0, "length_max": 4, "cut_share": 0.5}
    expected |= {"staleness": 8 / 6, "staleness_max": 2, "off_policy_share": 4 / 6, "samples": 2, "tokens": 6}
    expected |= {
        "reward_min": 0.0,
        "reward_max": 1.0,
        "dropped_no_signal": 3,
        "time_train_s": 0.25,
        "lr": 0.01,
        "loss": 0.1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith(("reward/", "part/", "weights_", "lone_")) for name in row)


def test_the_first_batchs_reward_is_shown_before_its_step_but_only_in_a_slow_run(reporter, monkeypatch):
    batch = Batch(0, 0, (group(member(2, 1.0), member(4, 0.0)), group(member(2, 0.5), member(2, 0.5))))
    reporter.claimed(batch)
    assert reporter.console.file.getvalue() == ""
    monkeypatch.setattr(metrics, "FIRST_BATCH_AFTER_S", 0.0)
    reporter.claimed(batch)
    assert reporter.console.file.getvalue() == "first batch: 4 answers, reward 0.500; training\n"
    reporter.claimed(replace(batch, step=1))  # ahead
    reporter.claimed(batch)  # by a trainer that was restarted
    reporter.step({**row_of(*batch.groups), "failures": 0})
    reporter.claimed(batch)
    assert reporter.console.file.getvalue().count("first batch") == 1


def test_the_reward_of_a_resumed_runs_first_batch_is_not_shown_again(reporter, monkeypatch):
    monkeypatch.setattr(metrics, "FIRST_BATCH_AFTER_S", 0.0)
    reporter.folder.attempt = 2
    reporter.claimed(Batch(0, 0, (group(member(2, 1.0)),)))
    assert reporter.console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("abandoned", "undone", "told"),
    [
        ([], [], ""),
        ([], [22], ""),
        ([21], [], "; step 21 came"),
        ([21, 22, 23, 24, 25], [22, 23, 24, 25], "; steps 21 to 25 came"),
        ([21, 22], [22, 23], "; steps 21 and 22 came"),  # the batch of step 23 was claimed, but not trained
        ([21, 22, 24], [22], "; steps 21 and 22 came"),  # step 22 has two versions
    ],
)
def test_a_resume_tells_which_steps_are_trained_again(reporter, abandoned, undone, told):
    reporter.event("resume", step=20, version=26, abandoned=abandoned, undone_steps=undone, reissued_groups=3)
    shown = reporter.console.file.getvalue()
    assert shown.partition(" after the last checkpoint and ")[0].rstrip() == f"resumed at step 20 as version 26{told}"


def test_tokens_that_may_not_be_trained_have_no_staleness():
    row = row_of(group(member(2, 1.0, staleness=-1)))
    assert (row["staleness"], row["staleness_max"], row["off_policy_share"]) == (0.0, 0, 0.0)


def test_several_sources_and_several_parts_of_a_reward_have_means_of_their_own():
    both = member(1, 1.0, parts=[("correct", 1.0), ("format", 0.5), ("format", 0.25)])
    row = row_of(group(both), group(member(1, 0.0, parts=[("correct", 0.0)]), source="b"))
    assert (row["reward/a"], row["reward/b"]) == (1.0, 0.0)
    assert (row["part/correct"], row["part/format"]) == (0.5, 0.75)


def test_siblings_that_are_claimed_apart_are_counted_by_what_was_known_of_them():
    alone, second = group(member(2, 1.0), prompt=1), group(member(4, 1.0), prompt=2, earlier=(1.0,))
    row = row_of(alone, second, num_siblings=2)
    assert (row["lone_share"], row["early_share"], row["early_length"]) == (0.5, 0.5, 2 / 3)
    assert "early_length" not in row_of(second, num_siblings=2)


def test_a_version_that_was_published_in_pieces_is_told_with_its_bytes():
    codings = list(Coding)[:2]
    figures = PublishFigures(3, Kind.DELTA, 100, dict.fromkeys(codings, 7), 0.1, 0.2, 0.3)
    row = row_of(group(member(1, 1.0)), weights=figures)
    assert (row["weights_kind"], row["weights_bytes"], row["weights_density"]) == (Kind.DELTA.value, 14, 0.1)
    assert (row["weights_encode_s"], row["weights_flush_s"]) == (0.2, 0.3)


@pytest.mark.parametrize(
    "kind, fields, words",
    [
        ("logprob_gap", {"step": 7, "gap": 0.5, "limit": 0.1}, ["step 7", "0.5", "loss.max_logprob_gap = 0.1"]),
        ("unused_weights", {"names": ["form", "tone"]}, ["reward.weights", "form, tone"]),
        ("backup_failed", {"target": "s3://b", "error": "gone"}, ["s3://b", "gone"]),
        ("quarantine", {"worker": "w1", "why": "forged"}, ["w1", "forged"]),
        ("evaluation_left_out", {"step": 7, "waited_s": 60.0}, ["step 7", "60 s"]),
        ("set_aside", {"worker": "w1", "seconds": 8.0, "why": "hoards"}, ["w1", "8 s", "hoards"]),
        ("clamped", {"step": 7, "share": 0.25}, ["step 7", "25.00%"]),
    ],
)
def test_what_a_user_has_to_know_is_an_alarm_and_an_event(reporter, capsys, kind, fields, words):
    reporter.report({"event": kind, **fields})
    alarm = capsys.readouterr().err
    assert all(word in alarm for word in words)
    written = json.loads((reporter.folder.path / "events.jsonl").read_text().splitlines()[-1])
    assert written["event"] == kind
    assert written.items() >= fields.items()


def test_an_alarm_that_may_come_at_every_step_is_shown_once(reporter, capsys):
    for step in (7, 8):
        reporter.report({"event": "logprob_gap", "step": step, "gap": 0.5, "limit": 0.1})
    shown = capsys.readouterr().err
    assert ("step 7" in shown, "step 8" in shown) == (True, False)
    events = [json.loads(line) for line in (reporter.folder.path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "logprob_gap"] == [7, 8]


def test_failures_are_told_once_and_counted_by_step(reporter, capsys):
    sink = Sink()
    reporter.sinks.append(sink)
    for step, failures in enumerate([0, 2, 5], start=1):
        reporter.report({"step": step, "reward": 0.5, "failures": failures, "tokens": 10, "samples": 2})
    assert [row["failures"] for row in sink.rows] == [0, 2, 3]
    assert all(row["tokens_per_second"] == pytest.approx(10 / row["seconds"]) for row in sink.rows)
    assert all(row["samples_per_second"] == pytest.approx(2 / row["seconds"]) for row in sink.rows)
    assert capsys.readouterr().err.count("2 samples failed") == 1


def test_the_first_step_does_not_count_the_start_of_its_trainer(reporter):
    sink = Sink()
    reporter.sinks.append(sink)
    reporter._last_s -= 60.0
    row = {"reward": 0.5, "failures": 0, "tokens": 10, "samples": 2, "time_wait_s": 1.5, "time_train_s": 0.5}
    for step in (1, 2):
        reporter.step({"step": step, **row})
    assert (sink.rows[0]["seconds"], sink.rows[0]["tokens_per_second"]) == (2.0, 5.0)
    assert sink.rows[1]["seconds"] < 1.0


def test_a_resumed_run_takes_longer_than_its_steps_although_its_trainer_waited_before_it(reporter):
    row = {"reward": 0.5, "failures": 0, "tokens": 10, "samples": 2, "time_wait_s": 60.0}
    reporter.folder.event("end", step=1)  # of the first attempt
    reporter.folder.attempt = 2
    reporter.step({"step": 2, **row})
    summary = reporter.finish(seconds=3.0, stopped_by=None, counts=Counts())
    assert summary["seconds_in_steps"] < 1.0
    assert summary["seconds"] > 3.0, "the first attempt counts, too"


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(reporter, capsys):
    broken, whole = Sink(OSError("disk full")), Sink()
    reporter.sinks[:] = [broken, whole]
    for step in (1, 2):
        reporter.step({"step": step, "reward": 0.5, "failures": 0, "tokens": 1, "samples": 1})
    assert (len(whole.rows), reporter.sinks) == (2, [whole])
    assert capsys.readouterr().err.count("disk full") == 1


def evaluated(source: str, *rewards: float, state: GroupState = GroupState.EVALUATED) -> EvalGroup:
    return EvalGroup(1, 0, source, state, None, rewards, 0, size=2)


def test_an_evaluation_is_a_mean_over_prompts_and_leaves_out_what_has_no_reward():
    groups = (evaluated("a", 1.0, 0.0), evaluated("b", 0.0), evaluated("b"), evaluated("b", 1.0, state=GroupState.OPEN))
    figures = eval_figures(EvalRound(4, False, groups))
    assert figures == {
        **{"eval_step": 4, "eval_prompts": 2, "eval_samples": 3, "eval_failed": 3, "eval_mean@2": 0.25},
        "eval_pass@2": 0.5,
        **{"eval/a_mean@2": 0.5, "eval/a_pass@2": 1.0, "eval/b_mean@2": 0.0, "eval/b_pass@2": 0.0},
    }
    nothing = {"eval_step": 4, "eval_prompts": 0, "eval_samples": 0, "eval_failed": 0}
    assert eval_figures(EvalRound(4, False, ())) == nothing


def test_a_summary_compares_the_first_steps_with_the_last():
    rows = [{"step": 0, "eval_mean@1": 0.1}]
    rows += [{"step": s, "reward": s / 100, "seconds": 2.0, "samples": 4, "tokens": 8} for s in range(1, 31)]
    rows += [{"step": 30, "eval_mean@1": 0.9}]
    summary = summarise(rows, 99.0, Counts(num_versions=31, max_staleness_trained=2))
    assert (summary["steps"], summary["seconds"], summary["versions"]) == (30, 99.0, 31)
    assert summary["reward_first"] == pytest.approx(0.02)  # steps 1 to 3
    assert summary["reward_last"] == pytest.approx(0.255)  # steps 21 to 30
    assert (summary["eval_first"], summary["eval_last"], summary["eval_step"]) == (0.1, 0.9, 30)
    assert summary["seconds_in_steps"] == 60.0
    assert (summary["samples_per_second"], summary["tokens_per_second"]) == (2.0, 4.0)
    assert summary["max_staleness_trained"] == 2


def test_a_missing_picture_is_told_with_the_line_that_installs_matplotlib(reporter, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reporter.finish(seconds=3.0, stopped_by=None, counts=Counts())
    assert "no reward.png, because matplotlib is not installed: pip install" in reporter.console.file.getvalue()
    assert not (reporter.folder.path / "reward.png").exists()


def test_a_run_that_trained_nothing_has_a_summary_too():
    summary = summarise([], 1.0, Counts())
    nothing = ("reward_first", "reward_last", "eval_first", "eval_last", "eval_step", "samples_per_second")
    assert summary["steps"] == 0
    assert [summary[name] for name in (*nothing, "tokens_per_second")] == [None] * 7
