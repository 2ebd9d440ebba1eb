"""The parts of a run around one ledger: coordinator, worker, trainer, evaluations.

They speak through the client interface only, as they will from different machines. Nothing durable is made before every
part could be: a run that cannot begin leaves its name free.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.folder import RunFolder
from offbeat.launch.report import Reporter
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.trainer import StepReport, Trainer
from offbeat.reward.pool import RewardPool
from offbeat.rollout.worker import Worker
from offbeat.serve.coordinator import Coordinator
from offbeat.tasks.mixture import Mixture
from offbeat.watch.console import open_console
from offbeat.watch.sinks import open_sinks
from offbeat.weights.store import WeightStore

WORKER = "local"


async def run(folder: RunFolder, mixture: Mixture, pool: RewardPool) -> dict[str, Any]:
    """Trains until the run ends and returns its summary."""
    config, start_s = folder.config, time.monotonic()
    async with AsyncExitStack() as stack:
        with interruptible():
            wiring.set_threads(config)
            tokens = wiring.load_tokens(config)
            issuer = wiring.make_issuer(config, mixture, tokens)
            issuer.try_out()
            policy, reference = wiring.make_policy(config)
            engine = wiring.make_engine(config, WORKER)
        stack.push_async_callback(engine.close)
        ledger = stack.enter_context(wiring.open_ledger(config, folder.ledger))
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, tokens)
        stack.push_async_callback(coordinator.close)
        rewards = {name: member.reward for name, member in mixture.members.items()}
        _hold(folder, "model.chat_template", "template_hash", issuer.renderer.template_hash)
        _hold(folder, "task.reward", "rewards", rewards)

        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        console = stack.enter_context(
            open_console(config.log.console, config.run.steps, max(checkpoints.steps(), default=0))
        )
        sinks = open_sinks(config.log.sinks, folder.path, config.log.project, {})
        for sink in sinks:
            stack.callback(sink.close)
        reporter = Reporter(folder, console, sinks)
        if config.eval.every and not issuer.eval_plan.every:
            console.note("no evaluation: no task has a held-out split")

        def on_step(report: StepReport) -> None:
            reporter.step(report, coordinator.time_split(), coordinator.scorer.num_failed)

        trainer = Trainer(
            coordinator,
            policy,
            WeightStore(folder.weights),
            checkpoints,
            wiring.trainer_settings(config),
            reference=reference,
            span=folder.span,
            event=reporter.event,
            on_step=on_step,
        )
        stopping = Stopping(reporter.stopping)
        stopping.listen()
        await coordinator.start()
        if await trainer.start() >= config.run.steps:
            console.note(f"the run is at step {trainer.step} already; raise run.steps to go on")
        await _work(config, coordinator, Worker(WORKER, engine, coordinator), trainer, reporter, stopping)
        is_finished = trainer.step >= config.run.steps
        return reporter.finish(
            seconds=time.monotonic() - start_s,
            stopped_by=None if is_finished else stopping.why,
            counts=await coordinator.call(ledger.counts),
        )


def _hold(folder: RunFolder, key: str, fact: str, value: Any) -> None:
    """Records what the configuration alone does not tell and what must not change half-way: it would change what is
    trained. A file's chat template is such a thing, and a reward handed in from Python."""
    before = folder.last_event(fact)
    if before is None:
        folder.event(fact, value=value)
    elif before["value"] != value:
        raise UserError(
            f"{key}: the run began with {fact} {before['value']}, now it is {value}; bring back the first, or start "
            "a new run"
        )


async def _work(
    config: Config,
    coordinator: Coordinator,
    worker: Worker,
    trainer: Trainer,
    reporter: Reporter,
    stopping: Stopping,
) -> None:
    """Lets all parts run until the trainer is done; the first error of any of them ends them all."""
    async with asyncio.TaskGroup() as parts:
        working = parts.create_task(worker.run())
        judging = parts.create_task(_evaluations(config, coordinator, trainer.step, reporter))
        clock = parts.create_task(stopping.after(config.run.max_hours))
        asked = parts.create_task(stopping.requested.wait())
        await trainer.run(stopping.requested)
        if trainer.step >= config.run.steps:
            await asyncio.wait({judging, asked}, timeout=config.rollout.deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not judging.done():
                reporter.console.alarm("the last evaluation is left out: it was not complete when the run ended")
        for part in (judging, asked, clock, working):
            part.cancel()


async def _evaluations(config: Config, coordinator: Coordinator, first_step: int, reporter: Reporter) -> None:
    """Reports evaluations as they are completed, one after the other."""
    plan = coordinator.issuer.eval_plan
    for step in range(first_step, config.run.steps + 1):
        if plan.is_due(step, config.run.steps):
            reporter.evaluation(await coordinator.evaluation(step))
