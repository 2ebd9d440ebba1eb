"""What is around a run's ledger, wherever workers and trainer are: the coordinator, and whoever tells people about it.

Nothing durable is made before every part could be: a run that cannot begin leaves its name free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.folder import RunFolder
from offbeat.launch.report import Reporter
from offbeat.ledger.ledger import Ledger
from offbeat.reward.pool import RewardPool
from offbeat.serve.clearing import Clearing
from offbeat.serve.coordinator import Coordinator
from offbeat.serve.issuing import Issuer
from offbeat.tasks.mixture import Mixture
from offbeat.watch.console import Console, open_console
from offbeat.watch.sinks import open_sinks
from offbeat.weights.folder import WeightFolder


@dataclass(frozen=True)
class Prepared:
    """What can be wrong with prompts, found before anything is written."""

    tokens: wiring.Tokens
    issuer: Issuer


def prepare(config: Config, mixture: Mixture) -> Prepared:
    tokens = wiring.load_tokens(config)
    issuer = wiring.make_issuer(config, mixture, tokens)
    issuer.try_out()
    return Prepared(tokens, issuer)


@dataclass(frozen=True)
class Office:
    ledger: Ledger
    coordinator: Coordinator
    reporter: Reporter
    console: Console


@asynccontextmanager
async def open_office(
    folder: RunFolder, mixture: Mixture, pool: RewardPool, prepared: Prepared
) -> AsyncIterator[Office]:
    config, issuer = folder.config, prepared.issuer
    async with AsyncExitStack() as stack:
        ledger = stack.enter_context(wiring.open_ledger(config, folder.ledger))
        clearing = Clearing(WeightFolder(folder.weights), wiring.open_pieces(config, folder.weights))
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, prepared.tokens, clearing)
        stack.push_async_callback(coordinator.close)
        rewards = {name: member.reward for name, member in mixture.members.items()}
        _hold(folder, "model.chat_template", "template_hash", issuer.renderer.template_hash)
        _hold(folder, "task.reward", "rewards", rewards)
        latest = ledger.latest_version()
        console = stack.enter_context(open_console(config.log.console, config.run.steps, latest.step if latest else 0))
        sinks = open_sinks(config.log.sinks, folder.path, config.log.project, {})
        for sink in sinks:
            stack.callback(sink.close)
        reporter = Reporter(folder, console, sinks)
        scorer = coordinator.judging.scorer
        coordinator.on_report = lambda row: reporter.told(
            row, coordinator.time_split(), scorer.num_failed, coordinator.step_figures
        )
        if config.eval.every and not issuer.eval_plan.every:
            console.note("no evaluation: no task has a held-out split")
        yield Office(ledger, coordinator, reporter, console)


def _hold(folder: RunFolder, key: str, fact: str, value: Any) -> None:
    """Records what the configuration alone does not tell and what must not change half-way: it would change what is
    trained. A file's chat template is such a thing, and a reward handed in from Python."""
    before = folder.last_event(fact)
    if before is None or "value" not in before:
        folder.event(fact, value=value)
    elif before["value"] != value:
        raise UserError(
            f"{key}: the run began with {fact} {before['value']}, now it is {value}; bring back the first, or start "
            "a new run"
        )


async def report_evaluations(config: Config, office: Office, first_step: int) -> None:
    """Reports evaluations as they are completed, one after the other, up to the last."""
    plan = office.coordinator.issuer.eval_plan
    for step in range(first_step, config.run.steps + 1):
        if plan.is_due(step, config.run.steps):
            office.reporter.evaluation(await office.coordinator.evaluation(step))


async def await_last_evaluation(
    config: Config, office: Office, judging: asyncio.Task[None], asked: asyncio.Task[Any]
) -> None:
    """Waits, once the last step is trained, until `judging` has reported its evaluation or `asked` ends the run.

    A worker that has vanished, or a reward that nobody computes, must not keep a finished run from ending: after
    `rollout.deadline_s` the evaluation is left out, which is told.
    """
    begin_s = time.monotonic()
    await asyncio.wait({judging, asked}, timeout=config.rollout.deadline_s, return_when=asyncio.FIRST_COMPLETED)
    if not judging.done():
        office.reporter.event("evaluation_left_out", step=config.run.steps, waited_s=time.monotonic() - begin_s)
