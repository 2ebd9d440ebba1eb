"""Turns the reports of trainer and coordinator into rows of metrics.jsonl, lines on the console and the summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from offbeat.ledger.records import Batch, Counts, EvalGroup, EvalRound, GroupState, Member
from offbeat.observability.advice import Advice, Adviser, Keys
from offbeat.observability.console import Console, ends, held_out
from offbeat.observability.metric_files import read_events, read_metrics, seconds_before
from offbeat.observability.sinks import Sink, send

if TYPE_CHECKING:
    from offbeat.launch.run_folder import RunFolder
    from offbeat.trainer.trainer import StepReport
    from offbeat.weights.publish import PublishFigures


def eval_figures(finished: EvalRound) -> dict[str, float]:
    """Returns mean@k and pass@k over the held-out prompts, in total and, if there are several sources, by source.

    pass@k is the mean over prompts of the best of k rewards, which is the usual pass@k if rewards are 0 or 1. Answers
    whose generation or reward failed, and prompts without a scored answer, are left out. `eval_prompts` counts the
    prompts included, `eval_samples` the answers included, and `eval_failed` the answers left out.
    """
    judged = [group for group in finished.groups if group.state is GroupState.EVALUATED and group.rewards]
    num_scored = sum(len(group.rewards) for group in judged)
    figures: dict[str, float] = {
        "eval_step": finished.step,
        "eval_prompts": len(judged),
        "eval_samples": num_scored,
        "eval_failed": sum(group.size for group in finished.groups if group.state is not GroupState.OPEN) - num_scored,
    }
    if not judged:
        return figures
    figures.update(_means("eval", judged))
    sources = sorted({group.source for group in judged})
    if len(sources) > 1:
        for source in sources:
            figures.update(_means(f"eval/{source}", [group for group in judged if group.source == source]))
    return figures


def _means(prefix: str, groups: Sequence[EvalGroup]) -> dict[str, float]:
    k = max(group.size for group in groups)
    return {
        f"{prefix}_mean@{k}": sum(sum(group.rewards) / len(group.rewards) for group in groups) / len(groups),
        f"{prefix}_pass@{k}": sum(max(group.rewards) for group in groups) / len(groups),
    }


EVENT = "event"
"""Key that marks a trainer's report as an event; a report without it is a finished step."""
ALARMS = {
    "logprob_gap": "step {step}: log-probs of engine and trainer differ by {gap:.2g} on fresh tokens, over "
    "loss.max_logprob_gap = {limit:g}: compare model.dtype with the engine's dtype, or use rollout.engine = "
    '"embedded"',
    "backup_failed": "the ledger was not copied to {target}: {error}",
    "quarantine": "worker {worker} is quarantined and gets no more tasks: {why}",
    "evaluation_left_out": "the evaluation of step {step} is left out: it was not complete {waited_s:.0f} s after the "
    "last step; raise rollout.deadline_s",
    "set_aside": "worker {worker} gets no new work for {seconds:g} s: {why}",
    "clamped": "step {step}: {share:.2%} of the tokens have a log-ratio beyond the clamp, because the weights have "
    "changed too much since these tokens were sampled; lower optimizer.lr",
    "unused_weights": "reward.weights: no reward has had a part named {names} so far; check the spelling",
    "advice": "{text}",
}
"""Events that a person should act upon, with their texts on the console."""
FIRST_BATCH_AFTER_S = 3.0
"""If a run's first batch is claimed later than this many seconds after the start, its mean reward is shown before the
batch is trained on. In a faster run, the line of the first step follows soon enough."""
SHOWN_ONCE = ("logprob_gap", "clamped")
"""Kinds of alarms that may come at every step. The console shows only the first of each kind; events.jsonl has all."""


class Reporter:
    """Writes a row for each step to the run's folder, the console and the sinks."""

    def __init__(self, folder: RunFolder, console: Console, sinks: Sequence[Sink], *, from_python: bool = False):
        self.folder, self.console, self.sinks, self.from_python = folder, console, list(sinks), from_python
        self._last_s = time.monotonic()
        self._num_failed, self._is_first = 0, True
        self._shown: set[str] = set()
        self._has_told_left_out = self._has_told_first_batch = False
        self._seen_worker_s = self._last_s
        config = folder.config
        keys = Keys(config.rollout.max_new_tokens, config.batch.group_size, config.schedule.bound, config.optimizer.lr)
        said = [event["about"] for event in read_events(folder.events_file) if event["event"] == "advice"]
        self.adviser = Adviser(keys, str(folder.path), said)
        for row in read_metrics(folder.metrics_file):
            if row.get("reward") is not None:
                self.adviser.step(row)

    def event(self, kind: str, **fields: Any) -> None:
        self.folder.event(kind, **fields)
        if kind in ALARMS and not (kind in SHOWN_ONCE and kind in self._shown):
            self._shown.add(kind)
            shown = {name: ", ".join(value) if isinstance(value, list) else value for name, value in fields.items()}
            self.console.alarm(ALARMS[kind].format(**shown))
        elif kind == "prompt_left_out" and self.folder.config.rollout.long_prompts == "error":
            if not self._has_told_left_out:
                self.console.alarm(f"{fields['why']}; this prompt and others like it are left out: see events.jsonl")
            self._has_told_left_out = True
        elif kind == "resume":
            self.console.note(_resumed(**fields))

    def advise(self, found: Iterable[Advice]) -> None:
        if self.folder.config.rollout.engine == "paced":
            return  # it has no model, so nothing could be learnt
        for advice in found:
            self.event("advice", about=advice.about, text=advice.text)

    def doing(self, text: str, num_workers: int) -> None:
        """Shows what the run is doing now, and gives advice if `num_workers`, the number of present workers, has been 0
        for long. The caller calls it about once a second."""
        now_s = time.monotonic()
        if num_workers:
            self._seen_worker_s = now_s
        self.advise(self.adviser.no_worker(now_s - self._seen_worker_s))
        self.console.doing(text)

    def stopping(self, why: str) -> None:
        """Reports a request to end the run before its last step."""
        self.event("stop", why=why)
        self.console.note(
            f"stopping ({why}): finishing this step, then saving a checkpoint; stop again to leave at once"
        )

    def report(self, row: Mapping[str, Any]) -> None:
        """Writes and shows a report of the trainer: an event if it has the key `EVENT`, else the row of a step."""
        if EVENT in row:
            self.event(row[EVENT], **{key: value for key, value in row.items() if key != EVENT})
        else:
            self.step(row)

    def claimed(self, batch: Batch) -> None:
        """Shows the mean reward of a run's first batch as soon as training on it begins, because the training may take
        long. Shows it only once, although a restarted trainer claims the batch again."""
        is_awaited = batch.step == 0 and self._is_first and self.folder.attempt == 1
        if not is_awaited or self._has_told_first_batch or time.monotonic() - self._last_s < FIRST_BATCH_AFTER_S:
            return
        self._has_told_first_batch = True
        rewards = [member.reward for group in batch.groups for member in group.members]
        self.console.note(f"first batch: {len(rewards)} answers, reward {np.mean(rewards):.3f}; training")

    def step(self, row: Mapping[str, Any]) -> None:
        """Writes, shows and sends the row of a step (see `step_row`), with speeds added. `failures` in `row` counts the
        failed samples since the coordinator started; in the row that is written, it counts those since the previous
        step."""
        num_failed = row["failures"]
        failures, self._num_failed = num_failed - self._num_failed, num_failed
        if failures == num_failed > 0:
            self.console.alarm(
                f"step {row['step']}: {failures} samples failed and are not trained on, and the reward is the mean of "
                f"the others; see {self.folder.logs}"
            )
        now_s = time.monotonic()
        seconds = now_s - self._last_s
        if self._is_first:  # without the start of a trainer in another process, which may also have begun before us
            stages = sum(row.get(f"time_{stage}_s", 0.0) for stage in ("wait", "train", "publish"))
            seconds = min(stages, seconds) or seconds
        self._last_s, self._is_first = now_s, False
        self._emit(
            {
                **row,
                "failures": failures,
                "seconds": seconds,
                "tokens_per_second": row["tokens"] / seconds,
                "samples_per_second": row["samples"] / seconds,
            }
        )
        self.advise(self.adviser.step(row))

    def evaluation(self, finished: EvalRound) -> None:
        figures = eval_figures(finished)
        row = {"step": finished.step, **{k: v for k, v in figures.items() if k != "eval_step"}}
        self._emit(row)
        self.advise(self.adviser.evaluation(row))

    def finish(
        self, *, seconds: float, stopped_by: str | None, counts: Counts, command: str = "train"
    ) -> dict[str, Any]:
        """Writes, shows and returns the run's summary, and draws reward.png, both without steps that a resume undid.
        `seconds` is the time since the run was last started or resumed. `stopped_by` names the signal or request that
        ended the run early; None: it finished. `command` is the one that resumes the run."""
        rows = read_metrics(self.folder.metrics_file)
        earlier = seconds_before(self.folder.attempt, self.folder.metrics_file, self.folder.events_file)
        finished = stopped_by is None
        summary = {
            "run": str(self.folder.path),
            **summarise(rows, seconds + earlier, counts),
            "finished": finished,
            "stopped_by": stopped_by,
        }
        self.folder.summary(summary)
        self.folder.event("end", step=summary["steps"], finished=finished)
        if not self._plot(rows):
            self.console.note("no reward.png, because matplotlib is not installed: pip install matplotlib")
        self.console.finish(summary, str(self.folder.path), from_python=self.from_python, command=command)
        return summary

    def _emit(self, row: dict[str, Any]) -> None:
        self.folder.metrics(row)
        self.console.step(row)
        send(row, self.sinks, self.console.alarm)

    def _plot(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Draws reward.png if there is a reward to draw; returns False if matplotlib is missing."""
        from offbeat.observability.plot import has_matplotlib, plot_rewards

        if not has_matplotlib():
            return False
        picture = self.folder.path / "reward.png"
        try:
            plot_rewards(rows, picture, f"{self.folder.path.name}: {self.folder.config.model.path}")
        except OSError as error:  # the run itself is safe on disk by now
            self.console.alarm(f"{picture} cannot be written: {error.strerror}")
        return True


def _resumed(step: int, version: int, abandoned: Sequence[int] = (), undone_steps: Sequence[int] = (), **_: Any) -> str:
    """Describes a resume in words, from the fields of its event (see docs/run-folder.md)."""
    text = f"resumed at step {step} as version {version}"
    if not abandoned:
        return text
    # A step has several versions if it was resumed at, and the last batch may have been claimed but not trained.
    last = min(step + len(abandoned), max(undone_steps, default=step + 1))
    if last == step + 1:
        return f"{text}; step {last} came after the last checkpoint and is trained again"
    joint = "and" if last == step + 2 else "to"
    return f"{text}; steps {step + 1} {joint} {last} came after the last checkpoint and are trained again"


RANK_SECONDS = "train_s_of_ranks"
"""Key in a reported row: the seconds that each of a trainer's ranks trained. They are for the trace, no metric."""


def step_row(report: StepReport, spans: Mapping[str, float], num_siblings: int) -> dict[str, Any]:
    """Returns the trainer's figures of a step, for its row in metrics.jsonl. `spans` holds the seconds that each part
    of the step took, by name; `num_siblings` is the number of groups drawn for each prompt."""
    members = [member for group in report.batch.groups for member in group.members]
    rewards = np.array([member.reward for member in members])
    lengths = np.array([member.trajectory.num_tokens for member in members])
    cut = np.array([member.trajectory.end == "length" for member in members])
    ages = np.concatenate([member.staleness[member.mask] for member in members])
    row = {
        "step": report.step + 1,
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "length": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "cut_share": float(cut.mean()),
        "lr": report.lr,
        **report.metrics.row(),
        "staleness": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": int(ages.max(initial=0)),
        "off_policy_share": float((ages > 0).mean()) if len(ages) else 0.0,
        "samples": len(members),
        "tokens": int(lengths.sum()),
        "dropped_no_signal": report.batch.num_no_signal,
        **{f"time_{name}_s": value for name, value in spans.items()},
        **(_siblings_row(report.batch, num_siblings) if num_siblings > 1 else {}),
        **_weights_row(report.weights),
        **_episodes_row(members),
    }
    by_source = {group.source for group in report.batch.groups}
    if len(by_source) > 1:
        for source in sorted(by_source):
            own = [m.reward for g in report.batch.groups if g.source == source for m in g.members]
            row[f"reward/{source}"] = float(np.mean(own))
    return row | _parts_row(members)


def _episodes_row(members: Sequence[Member]) -> dict[str, float]:
    """Returns figures about episodes: turns, calls and seconds of waiting for tools, each the mean of an episode; the
    shares of calls that were given up at their time limit (`cut_calls`) and that failed; the number of failed calls by
    tool; and the shares of ends. Empty if there are no episodes."""
    trajectories = [member.trajectory for member in members if member.trajectory.episode is not None]
    records = [trajectory.episode for trajectory in trajectories if trajectory.episode is not None]
    if not records:
        return {}
    calls = [call for record in records for call in record.calls]
    row = {
        "turns": float(np.mean([record.num_turns for record in records])),
        "tool_s": float(np.mean([record.wait_ms for record in records])) / 1e3,
        "calls": len(calls) / len(records),
        "cut_calls": sum(call.status == "cut" for call in calls) / max(1, len(calls)),
        "failed_calls": sum(call.status not in ("ok", "cut") for call in calls) / max(1, len(calls)),
    }
    ends = Counter(str(trajectory.end) for trajectory in trajectories)
    errors = Counter(call.tool or "no name" for call in calls if call.status not in ("ok", "cut"))
    row |= {f"end/{end}": count / len(records) for end, count in sorted(ends.items())}
    return row | {f"tool_errors/{tool}": float(count) for tool, count in errors.most_common(MAX_TOOLS)}


MAX_TOOLS = 16
"""Number of tools whose failed calls are counted by name; a model may invent any number of names."""


def _siblings_row(batch: Batch, num_siblings: int) -> dict[str, float]:
    """Returns figures about siblings (other answers to the same prompt) at the time when the batch was claimed.

    `lone_share` is the share of answers for which no sibling had a reward yet. An answer is early if at least one of
    its siblings had no reward yet: `early_share` is the share of early answers. `early_length` is the mean length of
    early answers divided by the mean length of all answers; it is left out if no answer is early."""
    num_here = Counter(group.prompt for group in batch.groups)
    num_known = np.array([num_here[group.prompt] + len(group.earlier) for group in batch.groups])
    lengths = np.array([member.trajectory.num_tokens for group in batch.groups for member in group.members])
    is_early = num_known < num_siblings
    row = {"lone_share": float(np.mean(num_known == 1)), "early_share": float(is_early.mean())}
    if is_early.any():
        row["early_length"] = float(lengths[is_early].mean() / lengths.mean())
    return row


def _parts_row(members: Sequence[Member]) -> dict[str, float]:
    """Returns the mean of each named part of the rewards, before weighting; empty if there is only one part."""
    values: dict[str, list[float]] = {}
    for member in members:
        own: dict[str, float] = {}
        for reward in member.rewards:
            own[reward.name] = own.get(reward.name, 0.0) + reward.value
        for name, value in own.items():
            values.setdefault(name, []).append(value)
    return {f"part/{name}": float(np.mean(found)) for name, found in sorted(values.items())} if len(values) > 1 else {}


def _weights_row(figures: PublishFigures | None) -> dict[str, Any]:
    """Returns the figures of publishing a step's weights in pieces; empty if whole files were published."""
    if figures is None or not figures.coded_bytes:
        return {}
    return {
        "weights_kind": figures.kind.value,
        "weights_bytes": sum(figures.coded_bytes.values()),
        "weights_density": figures.density,
        "weights_encode_s": figures.encode_s,
        "weights_flush_s": figures.flush_s,
    }


def summarise(rows: Sequence[Mapping[str, Any]], seconds: float, counts: Counts) -> dict[str, Any]:
    """Returns a run's summary. `rows` are its metric rows, without those that a resume undid; `seconds` is the time of
    all attempts together."""
    steps = [row for row in rows if "reward" in row]
    evals = [(value, row) for row in rows if (value := held_out(row)) is not None]
    spent = _sum(steps, "seconds")
    num_first, num_last = ends(len(steps))

    def mean_reward(part: Sequence[Mapping[str, Any]]) -> float | None:
        rewards = [row["reward"] for row in part if row["reward"] is not None]
        return float(np.mean(rewards)) if rewards else None

    return {
        "steps": steps[-1]["step"] if steps else 0,
        "seconds": seconds,
        "seconds_in_steps": spent,
        "reward_first": mean_reward(steps[:num_first]),
        "reward_last": mean_reward(steps[-num_last:]),
        "eval_first": evals[0][0] if evals else None,
        "eval_last": evals[-1][0] if evals else None,
        "eval_step": evals[-1][1]["step"] if evals else None,
        **{name: evals[-1][1].get(name) if evals else None for name in ("eval_prompts", "eval_samples", "eval_failed")},
        "samples_per_second": _sum(steps, "samples") / spent if spent else None,
        "tokens_per_second": _sum(steps, "tokens") / spent if spent else None,
        "max_staleness_trained": counts.max_staleness_trained,
        "trajectories": {k: v for k, v in asdict(counts.trajectories).items() if k != "evaluated"},
        "versions": counts.num_versions,
        "failures": dict(counts.failed_tasks),
    }


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0 for row in rows)
