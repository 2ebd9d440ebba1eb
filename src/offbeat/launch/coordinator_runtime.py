"""The coordinator with the parts around it in one process: ledger, reporter, console and metric sinks.

`prepare` finds errors in the tokenizer and the prompts before `open_coordinator` creates the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from offbeat.config.schema import SERVED, Config, is_episode
from offbeat.coordinator.admission import Issuer
from offbeat.coordinator.coordinator import Activity, Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.data.lengths import PromptLengths, measure_prompts, refuse_long
from offbeat.data.mixture import Mixture
from offbeat.environments.wire import PartInfo
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.given import Given
from offbeat.launch.run_folder import RunFolder
from offbeat.ledger.ledger import Ledger
from offbeat.observability.console import Console, held_out, open_console, short
from offbeat.observability.metric_files import read_metrics
from offbeat.observability.metrics import RANK_SECONDS, Reporter
from offbeat.observability.sinks import open_sinks
from offbeat.rewards.pool import RewardPool
from offbeat.weights.version import WeightFolder


@dataclass(frozen=True)
class Prepared:
    """Parts of a coordinator that are built before the ledger is created, so that errors in prompts are found early."""

    tokens: wiring.TokenLimits
    issuer: Issuer
    lengths: list[PromptLengths]


def prepare(
    config: Config, mixture: Mixture, tokens: wiring.TokenLimits, parts: Mapping[str, PartInfo] | None = None
) -> Prepared:
    issuer = wiring.make_issuer(config, mixture, tokens, parts)
    plan, rollout = issuer.eval_plan, config.rollout
    lengths = measure_prompts(mixture, issuer.renderer, plan.num_prompts if plan.every else 0)
    refuse_long(lengths, rollout.long_prompts, rollout.max_prompt_tokens)
    if plan.every and not issuer.held_out(version=0):
        issuer.eval_plan = replace(plan, every=0)
    return Prepared(tokens, issuer, lengths)


@dataclass(frozen=True)
class CoordinatorRuntime:
    ledger: Ledger
    coordinator: Coordinator
    reporter: Reporter
    console: Console


@asynccontextmanager
async def open_coordinator(
    folder: RunFolder,
    mixture: Mixture,
    pool: RewardPool,
    prepared: Prepared,
    given: Given | None = None,
    *,
    only_worker: str = "",
    num_generated: Callable[[], int | None] = lambda: None,
) -> AsyncIterator[CoordinatorRuntime]:
    """Opens the coordinator with its ledger, reporter, console and metric sinks: the configured sinks and those of
    `given`, which is what a Python program adds to the configuration. `only_worker` is the name of the worker in a run
    of one process, "" in any other run; `num_generated` returns the number of tokens that this worker has generated."""
    config, issuer, given = folder.config, prepared.issuer, given or Given()
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(wiring.open_ledger(config, folder.ledger))
        clearing = WeightGarbageCollector(WeightFolder(folder.weights), wiring.open_pieces(config, folder.weights))
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, prepared.tokens, clearing)
        stack.push_async_callback(coordinator.close)
        rewards = {name: member.reward for name, member in mixture.members.items()}
        _record_fixed(folder, "model.chat_template", "template_hash", issuer.renderer.template_hash)
        _record_fixed(folder, "task.reward", "rewards", rewards)
        latest = ledger.latest_version()
        first_step = latest.step if latest else 0
        console = stack.enter_context(
            open_console(
                config.log.console,
                config.run.steps,
                first_step,
                has_workers=not only_worker,
                has_episodes=any(map(is_episode, config.task)),
            )
        )
        given.on_console(console)
        sinks = [*open_sinks(config.log.sinks, folder.path, config.log.project, {}), *given.sinks]
        for sink in sinks:
            stack.callback(sink.close)
        reporter = Reporter(folder, console, sinks, from_python=given.from_python)
        coordinator.only_worker = only_worker
        coordinator.on_report = reporter.report if only_worker else partial(_report_and_trace, reporter)
        coordinator.on_claim = reporter.claimed
        coordinator.record_spans(folder.trace.record)
        if config.eval.every and not issuer.eval_plan.every:
            console.note("no evaluation: no task has a held-out split")
        server = config.rollout.engine if config.rollout.engine in SERVED and config.engine.url is None else ""
        showing = asyncio.create_task(_show_activity(coordinator, reporter, num_generated, server))
        stack.push_async_callback(_end, showing)
        yield CoordinatorRuntime(ledger, coordinator, reporter, console)


TRAINER_STAGES = ("publish", "train", "wait", "checkpoint")
"""Stages whose durations the trainer reports with a step, latest first. The checkpoint is that of the previous step."""


def _report_and_trace(reporter: Reporter, row: Mapping[str, Any]) -> None:
    """Reports a step's row of metrics (or an event) that a trainer in another process sent, and records the trainer's
    stages in this process's trace. The row holds only durations, but it is sent right after the step. So the last
    stage is taken to end now, and each earlier stage when the next one begins."""
    end_s, trace = time.monotonic(), reporter.folder.trace
    for stage in TRAINER_STAGES:
        seconds = row.get(f"time_{stage}_s", 0.0)
        if seconds:
            trace.record("trainer", stage, end_s - seconds, end_s, step=row["step"])
        if stage == "train":
            for rank, own_s in enumerate(row.get(RANK_SECONDS, ())):
                trace.record(f"trainer rank {rank}", stage, end_s - min(own_s, seconds), end_s, step=row["step"])
        end_s -= seconds
    reporter.report({name: value for name, value in row.items() if name != RANK_SECONDS})


ACTIVITY_EVERY_S = 1.0


async def _show_activity(
    coordinator: Coordinator, reporter: Reporter, num_generated: Callable[[], int | None], server: str
) -> None:
    had_worker, before, before_s = False, num_generated(), time.monotonic()
    while True:
        await asyncio.sleep(ACTIVITY_EVERY_S)
        activity = await coordinator.activity()
        had_worker |= activity.num_workers > 0
        now, now_s = num_generated(), time.monotonic()
        rate = 0.0 if now is None or before is None else (now - before) / (now_s - before_s)
        before, before_s = now, now_s
        words = in_words(activity, coordinator.only_worker, server, had_worker=had_worker, tokens_per_second=rate)
        reporter.doing(words, activity.num_workers)


def in_words(
    activity: Activity, only_worker: str, server: str = "", *, had_worker: bool, tokens_per_second: float = 0.0
) -> str:
    """Returns a short text about what a run is doing, such as "training, answers 12/64".

    `only_worker` is the name of the worker in a run of one process, "" in any other run. `server` is the engine that
    workers start as a process, which takes long; "" if they start none. `had_worker`: whether a worker has been present
    before. `tokens_per_second` is the present speed of generation, 0 if unknown; it shows that long answers make
    progress.
    """
    if not activity.has_version:
        return "waiting for the trainer's first weights"
    if not activity.num_workers:
        if only_worker:
            return "starting the engine"
        start = f"; {server} takes a minute or two to start" if server else ""
        return f"waiting for {'a' if had_worker else 'the first'} worker{start}"
    words = ["training"] if activity.is_training else []
    if activity.num_answers or not (words or activity.num_eval_wanted):
        words.append(f"answers {activity.num_answers}/{activity.num_wanted}")
    if activity.num_eval_wanted:
        words.append(f"held-out {activity.num_eval_answers}/{activity.num_eval_wanted}")
    if tokens_per_second:
        words.append(f"{short(tokens_per_second)} tokens/s")
    return ", ".join(words)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # the ledger's error, which all callers of the coordinator get


def _record_fixed(folder: RunFolder, key: str, fact: str, value: Any) -> None:
    """Records `value` in an event of kind `fact`; on a resume, raises an error about `key` if the value has changed.
    Used for two values that may not change in a run but do not follow from the configuration alone: the hash of the
    chat template, and the rewards, which may come from Python."""
    before = folder.last_event(fact)
    if before is None or "value" not in before:
        folder.event(fact, value=value)
    elif before["value"] != value:
        raise UserError(
            f"{key}: the run began with {fact} = {before['value']}, but {fact} is now {value}; set {key} back to what "
            "the run began with, or start a new run"
        )


def first_to_evaluate(folder: RunFolder, up_to: int | None = None) -> int:
    """Returns the step after the last one with an evaluation in the metrics. Evaluations from this step on may not be
    reported yet, because an earlier process may have died while evaluating. Steps after `up_to`, which a resume undoes,
    do not count; None: all steps count."""
    rows = read_metrics(folder.metrics_file)
    judged = [row["step"] for row in rows if held_out(row) is not None and (up_to is None or row["step"] <= up_to)]
    return max(judged, default=-1) + 1


async def report_evaluations(config: Config, runtime: CoordinatorRuntime, first_step: int) -> None:
    """Reports the evaluation of each step from `first_step` on that has one (`eval.every`). Waits, without a time
    limit, until an evaluation is complete before it is reported."""
    plan = runtime.coordinator.issuer.eval_plan
    for step in range(first_step, config.run.steps + 1):
        if plan.is_due(step, config.run.steps):
            runtime.reporter.evaluation(await runtime.coordinator.evaluation(step))


async def await_last_evaluation(
    config: Config, runtime: CoordinatorRuntime, judging: asyncio.Task[None], asked: asyncio.Task[Any]
) -> None:
    """Waits, after the last step, until the task `judging` has reported the last evaluation, or until the task `asked`
    ends because the run was asked to stop.

    After `rollout.deadline_s` the evaluation is left out and an event is reported, because a lost worker or a missing
    reward must not keep a finished run from ending.
    """
    begin_s = time.monotonic()
    await asyncio.wait({judging, asked}, timeout=config.rollout.deadline_s, return_when=asyncio.FIRST_COMPLETED)
    if not judging.done():
        runtime.reporter.event("evaluation_left_out", step=config.run.steps, waited_s=time.monotonic() - begin_s)
