"""A whole run in one process, which has one worker. Worker and trainer use the coordinator through its client
interface.

A wrong task or reward is reported before torch is imported. A run ends with its last step, or by Ctrl-C, SIGTERM or
`run.max_hours`, always with a checkpoint. It may also end with an error; then it can be resumed from the ledger and the
last checkpoint.
"""

from __future__ import annotations

import asyncio
import copy
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.client.in_process import InProcessTrainer, InProcessWorker
from offbeat.config.schema import Config
from offbeat.engines.protocol import KvMode
from offbeat.errors import OffbeatError
from offbeat.extras import collecting_later, load_ahead
from offbeat.files import disk_trouble
from offbeat.launch import episode_parts, stopping, wiring
from offbeat.launch.coordinator_runtime import (
    CoordinatorRuntime,
    await_last_evaluation,
    first_to_evaluate,
    open_coordinator,
    report_evaluations,
)
from offbeat.launch.engine_parts import check_engine, make_engine
from offbeat.launch.given import Given
from offbeat.launch.preflight import check_device, checking, may_have_gpu
from offbeat.launch.run_folder import RunFolder
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.observability.console import program
from offbeat.observability.loading import loading
from offbeat.observability.metrics import step_row
from offbeat.observability.sinks import check_sinks
from offbeat.tools.page.background import BackgroundPage
from offbeat.worker.worker import Worker

if TYPE_CHECKING:
    from offbeat.trainer.trainer import StepReport, Trainer


def train(
    config: Config, *, given: Given | None = None, resume: Path | None = None, from_scratch: bool = False
) -> dict[str, Any]:
    """Runs a configuration to its end in this process and returns the run's summary.

    `resume` is the folder of a run to resume; with `from_scratch`, that run starts again from step 0 if its checkpoints
    are lost.
    """
    given = given or Given()
    check_sinks(config.log.sinks)
    check_engine(config, num_workers=None)
    wiring.need_processes(config, "judges cannot join a run of one process; set rollout.workers, or use offbeat serve")
    new = partial(RunFolder.create, config, given.rows, from_python=given.from_python)
    with RunFolder.open(resume, config) if resume else new() as folder:
        given.on_folder(folder.path)
        try:
            return stopping.run(_run(folder, given, from_scratch=from_scratch))
        except BaseException as failure:  # noqa: BLE001 - raised below, where it is not the context of its cause
            error = failure
        cause = _cause(error)
        cause = disk_trouble(cause) or cause
        with suppress(OffbeatError):  # on a full disk, the original error matters more
            folder.event("error", error=f"{type(cause).__name__}: {cause}")
        cause.__context__ = None  # a group of errors, of which a notebook would show every frame
        raise cause from (error if isinstance(error, OSError) and cause is not error else None)


def _cause(error: BaseException) -> BaseException:
    """Returns the first error in an exception group, because it explains the others; returns any other error itself."""
    return _cause(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


WORKER = "local"


async def _run(folder: RunFolder, given: Given, *, from_scratch: bool) -> dict[str, Any]:
    """Trains until the run ends and returns the run's summary; see `train` for the parameters."""
    config = folder.config
    async with AsyncExitStack() as stack:
        start_s, is_quiet = time.monotonic(), config.log.console == "quiet"
        if not may_have_gpu():
            await check_device(config.model.device)  # now, because torch would miss a GPU only much later
            load_ahead("torch", "lib/libtorch_cpu.so")
        checked = await stack.enter_async_context(checking(config, given, folder.path))
        checked.announce(folder)
        what = f"run {folder.path}: {config.model.path}, engine {config.rollout.engine}"
        with loading(what, is_quiet=is_quiet) as stage, interruptible():
            stage("importing torch")
            with collecting_later():
                import torch

                from offbeat.launch import model_parts
                from offbeat.trainer.checkpoint import Checkpoints
                from offbeat.trainer.trainer import Trainer
                from offbeat.weights.publish import Publisher

            stack.callback(torch.set_num_threads, torch.get_num_threads())
            model_parts.prepare_torch(config)
            stage("reading the model")
            settings = model_parts.trainer_settings(config)  # first, because it finds the user's own loss
            model = model_parts.load(config)
            twin = copy.deepcopy(model) if config.rollout.engine != "paced" else None  # faster than from disk
            policy, reference = model_parts.make_policy(config, model)
            adapter = model_parts.make_adapter(config, policy.model)
            engine = make_engine(config, WORKER, twin)
            del twin
        stack.push_async_callback(engine.close)
        runtime = await stack.enter_async_context(
            open_coordinator(
                folder,
                checked.mixture,
                checked.pool,
                checked.prepared,
                given,
                only_worker=WORKER,
                num_generated=lambda: engine.metrics.num_rows,
            )
        )
        coordinator, reporter = runtime.coordinator, runtime.reporter
        client = InProcessTrainer(coordinator)

        num_siblings = config.batch.siblings

        async def on_step(report: StepReport) -> None:
            await client.report(step_row(report, folder.trace.spans_since_last(), num_siblings))

        trainer = Trainer(
            client,
            policy,
            Publisher(folder.weights, adapter=adapter),
            Checkpoints(folder.checkpoints, config.checkpoint.keep, adapter),
            replace(settings, num_witnesses=0),  # the only worker is trusted
            reference=reference,
            size=model_parts.make_microbatch_size(config, policy, folder.path, reporter.event),
            span=folder.trace.span,
            event=reporter.event,
            on_step=on_step,
        )
        page = BackgroundPage([folder.path])
        stack.callback(page.close)
        runtime.console.note(f"see the run in a browser, while it trains: {page.url}")
        runtime.console.note(f"afterwards: {program()} page {folder.path}")
        stopping = Stopping(reporter.stopping)
        stack.enter_context(stopping.listening(given.stop))
        await coordinator.start()
        if await trainer.start(from_scratch=from_scratch) >= config.run.steps:
            runtime.console.note(f"the run is at step {trainer.step} already; raise run.steps to go on")
        episodes = await stack.enter_async_context(
            episode_parts.playing(config, checked.prepared.tokens, folder.logs / "environments.log")
        )
        worker = Worker(
            WORKER,
            engine,
            InProcessWorker(coordinator, WORKER),
            kv=KvMode(config.rollout.kv),
            kv_lag=config.rollout.kv_lag,
            finishes=config.schedule.new_version == "finish",
            episodes=episodes,
        )
        await _work(config, runtime, worker, trainer, stopping)
        is_finished = trainer.step >= config.run.steps
        return reporter.finish(
            seconds=time.monotonic() - start_s,
            stopped_by=None if is_finished else stopping.why,
            counts=await coordinator.call(runtime.ledger.counts),
        )


async def _work(
    config: Config, runtime: CoordinatorRuntime, worker: Worker, trainer: Trainer, stopping: Stopping
) -> None:
    """Runs worker and trainer until the trainer has ended, and reports evaluations meanwhile. An error in one of these
    tasks ends all of them."""
    async with asyncio.TaskGroup() as parts:
        working = parts.create_task(worker.run())
        first = max(trainer.step, first_to_evaluate(runtime.reporter.folder, up_to=trainer.step))
        judging = parts.create_task(report_evaluations(config, runtime, first))
        clock = parts.create_task(stopping.after(config.run.max_hours))
        asked = parts.create_task(stopping.requested.wait())
        await trainer.run(stopping.requested)
        if trainer.step >= config.run.steps:
            await await_last_evaluation(config, runtime, judging, asked)
        for part in (judging, asked, clock, working):
            part.cancel()
