"""A whole run in one process: coordinator, worker and trainer around one ledger.

The three speak through the client interface only, as they will from different machines. A run ends by its last step, by
Ctrl-C, SIGTERM or `run.max_hours`, always with a checkpoint; or by an error, which leaves the ledger and the last
checkpoint to resume from.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.launch.folder import RunFolder
from offbeat.launch.report import Reporter
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.trainer import StepReport, Trainer
from offbeat.rollout.worker import Worker
from offbeat.serve.coordinator import Coordinator
from offbeat.watch.console import open_console
from offbeat.watch.sinks import check_sinks, open_sinks
from offbeat.weights.store import WeightStore

WORKER = "local"
LAST_EVALUATION_WITHIN_S = 600.0
"""After the last step nothing else is left to do, so the last evaluation may take its time, but not for ever."""


def train(config: Config, *, reward: Callable[..., Any] | None = None, resume: Path | None = None) -> dict[str, Any]:
    """Runs a configuration to its end and returns the summary that is also in the run's folder."""
    check_sinks(config.log.sinks)
    with RunFolder.open(resume, config) if resume else RunFolder.create(config) as folder:
        try:
            return asyncio.run(_run(folder, reward))
        except ExceptionGroup as group:
            raise _cause(group) from None
        except BaseException as error:
            folder.event("error", error=f"{type(error).__name__}: {error}")
            raise


async def _run(folder: RunFolder, reward: Callable[..., Any] | None) -> dict[str, Any]:
    config, start_s = folder.config, time.monotonic()
    async with AsyncExitStack() as stack:
        wiring.set_threads(config)
        tokens = wiring.load_tokens(config)
        mixture = wiring.make_mixture(config, reward)
        pool = await wiring.open_pool(config, mixture, folder.logs / "rewards.log")
        stack.push_async_callback(pool.close)
        ledger = stack.enter_context(wiring.open_ledger(config, folder.ledger))
        coordinator = wiring.make_coordinator(config, ledger, mixture, pool, tokens)
        _hold_template(folder, coordinator.issuer.renderer.template_hash)
        stack.push_async_callback(coordinator.close)
        policy, reference = wiring.make_policy(config)
        engine = wiring.make_engine(config, WORKER)
        stack.push_async_callback(engine.close)

        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        console = stack.enter_context(
            open_console(config.log.console, config.run.steps, max(checkpoints.steps(), default=0))
        )
        reporter = Reporter(folder, console, open_sinks(config.log.sinks, folder.path, config.log.project, {}))

        def on_step(report: StepReport) -> None:
            reporter.step(report, coordinator.time_split())

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
        await coordinator.start()
        await trainer.start()
        await _work(config, coordinator, Worker(WORKER, engine, coordinator), trainer, reporter)
        counts = await coordinator.call(ledger.counts)
        return reporter.finish(
            seconds=time.monotonic() - start_s, finished=trainer.step >= config.run.steps, counts=counts
        )


def _hold_template(folder: RunFolder, template_hash: str | None) -> None:
    """Records which chat template renders this run's prompts; another one half-way would change what is trained."""
    before = folder.last_event("prompts")
    if before is None:
        folder.event("prompts", template_hash=template_hash)
    elif before["template_hash"] != template_hash:
        raise UserError(
            f"model.chat_template: the run began with the chat template of hash {before['template_hash']}, now it is "
            f"{template_hash}; bring back the first, or start a new run"
        )


async def _work(config: Config, coordinator: Coordinator, worker: Worker, trainer: Trainer, reporter: Reporter) -> None:
    """Lets all parts run until the trainer is done; the first error of any of them ends them all."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stop, f"{number.name}", reporter)
    async with asyncio.TaskGroup() as parts:
        working = parts.create_task(worker.run())
        judging = parts.create_task(_evaluations(config, coordinator, trainer.step, reporter))
        clock = parts.create_task(_stop_after(config.run.max_hours, stop, reporter))
        await trainer.run(stop)
        if trainer.step < config.run.steps:
            judging.cancel()
        else:
            await asyncio.wait({judging}, timeout=LAST_EVALUATION_WITHIN_S)
        for part in (judging, clock, working):
            part.cancel()


async def _evaluations(config: Config, coordinator: Coordinator, first_step: int, reporter: Reporter) -> None:
    """Reports evaluations as they are completed, one after the other."""
    plan = coordinator.issuer.eval_plan
    for step in range(first_step, config.run.steps + 1):
        if plan.is_due(step, config.run.steps):
            reporter.evaluation(await coordinator.evaluation(step))


async def _stop_after(hours: float | None, stop: asyncio.Event, reporter: Reporter) -> None:
    if hours is not None:
        await asyncio.sleep(hours * 3600)
        _stop(stop, f"run.max_hours = {hours:g}", reporter)


def _stop(stop: asyncio.Event, why: str, reporter: Reporter) -> None:
    """The first request ends the run after the step under way; the second, by a signal, at once."""
    if stop.is_set():
        raise KeyboardInterrupt
    stop.set()
    reporter.event("stop", why=why)
    reporter.console.note(f"stopping ({why}): finishing the step under way, then a checkpoint; once more to leave now")


def _cause(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first error that explains the others."""
    first = group.exceptions[0]
    return _cause(first) if isinstance(first, BaseExceptionGroup) else first
