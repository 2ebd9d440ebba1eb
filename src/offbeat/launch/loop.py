"""A whole run in one process: coordinator, one worker and the trainer take turns.

They speak through the client interface only, as they do from different machines.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import torch

from offbeat.config.models import Config
from offbeat.launch import models
from offbeat.launch.engines import make_engine
from offbeat.launch.folder import RunFolder
from offbeat.launch.office import Office, await_last_evaluation, open_office, prepare, report_evaluations
from offbeat.launch.report import step_row
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.trainer import StepReport, Trainer
from offbeat.reward.pool import RewardPool
from offbeat.rollout.engine import KvMode
from offbeat.rollout.worker import Worker
from offbeat.serve.inside import InsideTrainer, InsideWorker
from offbeat.tasks.mixture import Mixture
from offbeat.weights.publish import Publisher

WORKER = "local"


async def run(folder: RunFolder, mixture: Mixture, pool: RewardPool, *, from_scratch: bool = False) -> dict[str, Any]:
    """Trains until the run ends and returns its summary. With `from_scratch` one without a checkpoint begins again."""
    config, start_s = folder.config, time.monotonic()
    async with AsyncExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        with interruptible():
            models.prepare_torch(config)
            prepared = prepare(config, mixture)
            policy, reference = models.make_policy(config)
            adapter = models.make_adapter(config, policy)
            engine = make_engine(config, WORKER)
        stack.push_async_callback(engine.close)
        office = await stack.enter_async_context(open_office(folder, mixture, pool, prepared))
        coordinator, reporter = office.coordinator, office.reporter
        client = InsideTrainer(coordinator)
        coordinator.only_worker = WORKER

        async def on_step(report: StepReport) -> None:
            await client.report(step_row(report, folder.spans_since_last(), config.batch.siblings))

        trainer = Trainer(
            client,
            policy,
            Publisher(folder.weights, adapter=adapter),
            Checkpoints(folder.checkpoints, config.checkpoint.keep, adapter),
            replace(models.trainer_settings(config), num_witnesses=0),  # nobody but us hands in tokens
            reference=reference,
            span=folder.span,
            event=reporter.event,
            on_step=on_step,
        )
        stopping = Stopping(reporter.stopping)
        stack.enter_context(stopping.listening())
        await coordinator.start()
        if await trainer.start(from_scratch=from_scratch) >= config.run.steps:
            office.console.note(f"the run is at step {trainer.step} already; raise run.steps to go on")
        worker = Worker(
            WORKER,
            engine,
            InsideWorker(coordinator, WORKER),
            kv=KvMode(config.rollout.kv),
            kv_lag=config.rollout.kv_lag,
            finishes=config.schedule.new_version == "finish",
        )
        await _work(config, office, worker, trainer, stopping)
        is_finished = trainer.step >= config.run.steps
        return reporter.finish(
            seconds=time.monotonic() - start_s,
            stopped_by=None if is_finished else stopping.why,
            counts=await coordinator.call(office.ledger.counts),
        )


async def _work(config: Config, office: Office, worker: Worker, trainer: Trainer, stopping: Stopping) -> None:
    """Lets all parts run until the trainer is done; the first error of any of them ends them all."""
    async with asyncio.TaskGroup() as parts:
        working = parts.create_task(worker.run())
        judging = parts.create_task(report_evaluations(config, office, trainer.step))
        clock = parts.create_task(stopping.after(config.run.max_hours))
        asked = parts.create_task(stopping.requested.wait())
        await trainer.run(stopping.requested)
        if trainer.step >= config.run.steps:
            await await_last_evaluation(config, office, judging, asked)
        for part in (judging, asked, clock, working):
            part.cancel()
