"""The coordinator with the parts around it in one process: ledger, reporter, console and metric sinks.

Nothing durable is written before all parts are built, so a run that cannot begin leaves its name free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from offbeat.config.schema import Config
from offbeat.coordinator.admission import Issuer
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.data.lengths import PromptLengths, measure_prompts, refuse_long
from offbeat.data.mixture import Mixture
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.run_folder import RunFolder
from offbeat.ledger.ledger import Ledger
from offbeat.observability.console import Console, open_console
from offbeat.observability.metrics import Reporter
from offbeat.observability.sinks import open_sinks
from offbeat.rewards.pool import RewardPool
from offbeat.weights.version import WeightFolder


@dataclass(frozen=True)
class Prepared:
    """Parts of a coordinator that are built early, to find errors in prompts before anything is written."""

    tokens: wiring.TokenLimits
    issuer: Issuer
    lengths: list[PromptLengths]


def prepare(config: Config, mixture: Mixture) -> Prepared:
    tokens = wiring.load_tokens(config)
    issuer = wiring.make_issuer(config, mixture, tokens)
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
    folder: RunFolder, mixture: Mixture, pool: RewardPool, prepared: Prepared
) -> AsyncIterator[CoordinatorRuntime]:
    config, issuer = folder.config, prepared.issuer
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(wiring.open_ledger(config, folder.ledger))
        clearing = WeightGarbageCollector(WeightFolder(folder.weights), wiring.open_pieces(config, folder.weights))
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, prepared.tokens, clearing)
        stack.push_async_callback(coordinator.close)
        rewards = {name: member.reward for name, member in mixture.members.items()}
        _record_fixed(folder, "model.chat_template", "template_hash", issuer.renderer.template_hash)
        _record_fixed(folder, "task.reward", "rewards", rewards)
        latest = ledger.latest_version()
        console = stack.enter_context(open_console(config.log.console, config.run.steps, latest.step if latest else 0))
        sinks = open_sinks(config.log.sinks, folder.path, config.log.project, {})
        for sink in sinks:
            stack.callback(sink.close)
        reporter = Reporter(folder, console, sinks)
        coordinator.on_report = reporter.report
        if config.eval.every and not issuer.eval_plan.every:
            console.note("no evaluation: no task has a held-out split")
        yield CoordinatorRuntime(ledger, coordinator, reporter, console)


def _record_fixed(folder: RunFolder, key: str, fact: str, value: Any) -> None:
    """Records `value` in an event of kind `fact`; on a resume, raises an error about `key` if it has changed. For facts
    that are fixed but not configured: the hash of the chat template, and rewards passed in from Python."""
    before = folder.last_event(fact)
    if before is None or "value" not in before:
        folder.event(fact, value=value)
    elif before["value"] != value:
        raise UserError(
            f"{key}: the run began with {fact} {before['value']}, now it is {value}; restore the "
            "first value, or start a new run"
        )


async def report_evaluations(config: Config, runtime: CoordinatorRuntime, first_step: int) -> None:
    """Reports all due evaluations from `first_step` on, each once it is complete, without a time limit."""
    plan = runtime.coordinator.issuer.eval_plan
    for step in range(first_step, config.run.steps + 1):
        if plan.is_due(step, config.run.steps):
            runtime.reporter.evaluation(await runtime.coordinator.evaluation(step))


async def await_last_evaluation(
    config: Config, runtime: CoordinatorRuntime, judging: asyncio.Task[None], asked: asyncio.Task[Any]
) -> None:
    """Waits, after the last step, until the task `judging` has reported the last evaluation, or until the task `asked`
    ends because the run was asked to stop.

    A lost worker or a missing reward must not keep a finished run from ending: after `rollout.deadline_s` the
    evaluation is left out and an event is reported.
    """
    begin_s = time.monotonic()
    await asyncio.wait({judging, asked}, timeout=config.rollout.deadline_s, return_when=asyncio.FIRST_COMPLETED)
    if not judging.done():
        runtime.reporter.event("evaluation_left_out", step=config.run.steps, waited_s=time.monotonic() - begin_s)
