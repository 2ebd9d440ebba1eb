"""A run's trainer in a process of its own: `offbeat trainer --join URL`.

It keeps checkpoints in its own folder and everything else at the coordinator: metrics and events are reported there,
and versions sent unless the two share a disk. Asked to stop, it finishes the step under way and ends with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from offbeat.launch.joining import Invitation, joined, say_over
from offbeat.launch.report import EVENT, step_row
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.serve.http.client import RemoteTrainer
from offbeat.serve.http.connection import Connection
from offbeat.watch.trace import Trace
from offbeat.weights.pieces import PieceStore

KEY = "signing.key"
"""In the trainer's folder: what its manifests are signed with."""


async def train(
    invitation: Invitation, overrides: Sequence[str], run: Path | None, *, from_scratch: bool = False
) -> str | None:
    """Trains until the run ends; returns why it stopped before. `run` is the coordinator's own folder of the run,
    where trainer and coordinator share a disk. With `from_scratch` a run that it has no checkpoint of begins again."""
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        config, folder = member.config, invitation.folder
        with interruptible():
            from offbeat.launch import models
            from offbeat.learn.checkpoint import Checkpoints
            from offbeat.learn.trainer import StepReport, Trainer

            models.prepare_torch(config)
            policy, reference = models.make_policy(config)
            adapter = models.make_adapter(config, policy)
        weights = models.make_publisher(config, (run or folder) / "weights", folder / KEY, adapter, is_away=run is None)
        own = None if config.weights.store else weights.store  # a store that all reach needs no sending
        signer = "" if weights.key is None else weights.key.public
        client = _Client(member.connection, shares_disk=run is not None, store=own, signer=signer)
        trace = Trace(folder / "trainer-trace.json")
        stack.callback(trace.close)

        async def on_step(report: StepReport) -> None:
            await client.tell_events()
            await client.report(step_row(report, trace.spans_since_last(), config.batch.siblings))
            trace.flush()

        trainer = Trainer(
            client,
            policy,
            weights,
            Checkpoints(folder / "checkpoints", config.checkpoint.keep, adapter),
            models.trainer_settings(config),
            reference=reference,
            span=trace.span,
            event=lambda kind, **fields: client.events.append({EVENT: kind, **fields}),
            on_step=on_step,
        )
        stopping = Stopping(lambda why: None)
        stack.enter_context(stopping.listening())
        await trainer.start(from_scratch=from_scratch)
        await trainer.run(stopping.requested)
        if trainer.step < config.run.steps:
            return stopping.why
        say_over(invitation, member, "trainer")
        return None


class _Client(RemoteTrainer):
    """Tells what happened before it tells of a checkpoint: that may be the end of the run, and of its coordinator."""

    def __init__(self, connection: Connection, *, shares_disk: bool, store: PieceStore | None, signer: str):
        super().__init__(connection, shares_disk=shares_disk, store=store, signer=signer)
        self.events: list[dict[str, Any]] = []

    async def tell_events(self) -> None:
        while self.events:
            await self.report(self.events[0])
            del self.events[0]

    async def checkpointed(self, step: int) -> None:
        await self.tell_events()
        await super().checkpointed(step)
