"""The trainer's process: `offbeat trainer --join URL`.

It keeps checkpoints in its own folder, and sends metrics and events to the coordinator. It also sends versions if it
shares neither a disk nor a store with the coordinator. When asked to stop, it finishes the current step and ends with a
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteTrainer
from offbeat.launch.gpu_memory import LOCK, num_servers, taking_turns
from offbeat.launch.joining import Invitation, joined, report_run_over
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.observability.metrics import EVENT, step_row
from offbeat.observability.trace import Trace
from offbeat.waiting import unless
from offbeat.weights.piece_store import PieceStore

KEY = "signing.key"
"""File in the trainer's folder with the key that signs its manifests."""


async def train(
    invitation: Invitation, overrides: Sequence[str], run: Path | None, *, from_scratch: bool = False
) -> str | None:
    """Joins a run and trains until the run ends. Returns None, or the reason if this trainer was stopped before.

    `run` is the coordinator's run folder if both share a disk; None: they do not. With `from_scratch`, the run starts
    again from step 0 if this trainer has no checkpoint of it.
    """
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        config, folder = member.config, invitation.folder
        events: list[dict[str, Any]] = []

        def event(kind: str, **fields: Any) -> None:
            events.append({EVENT: kind, **fields})

        with interruptible(), taking_turns(run / LOCK if run and num_servers(config) else None):
            from offbeat.launch import model_parts
            from offbeat.trainer.checkpoint import Checkpoints
            from offbeat.trainer.trainer import StepReport, Trainer

            model_parts.prepare_torch(config)
            policy, reference = model_parts.make_policy(config)
            adapter = model_parts.make_adapter(config, policy)
            size = model_parts.make_microbatch_size(config, policy, folder, event)
        weights = model_parts.make_publisher(
            config, (run or folder) / "weights", folder / KEY, adapter, is_away=run is None
        )
        own = None if config.weights.store else weights.store  # a shared store needs no uploads
        signer = "" if weights.key is None else weights.key.public
        client = _Client(member.connection, events, shares_disk=run is not None, store=own, signer=signer)
        trace = Trace(folder / "trainer-trace.json")
        stack.callback(trace.close)
        num_siblings = config.batch.siblings

        async def on_step(report: StepReport) -> None:
            await client.send_events()
            await client.report(step_row(report, trace.spans_since_last(), num_siblings))
            trace.flush()

        trainer = Trainer(
            client,
            policy,
            weights,
            Checkpoints(folder / "checkpoints", config.checkpoint.keep, adapter),
            model_parts.trainer_settings(config),
            reference=reference,
            size=size,
            span=trace.span,
            event=event,
            on_step=on_step,
        )
        stopping = Stopping()
        stack.enter_context(stopping.listening())
        if not await unless(stopping.requested, trainer.start(from_scratch=from_scratch)):
            return stopping.why
        await trainer.run(stopping.requested)
        if trainer.step < config.run.steps:
            return stopping.why
        report_run_over(invitation, member, "trainer")
        return None


class _Client(RemoteTrainer):
    """Client that sends pending events before it reports a checkpoint, because the coordinator may end after the last
    checkpoint."""

    def __init__(
        self,
        connection: Connection,
        events: list[dict[str, Any]],
        *,
        shares_disk: bool,
        store: PieceStore | None,
        signer: str,
    ):
        super().__init__(connection, shares_disk=shares_disk, store=store, signer=signer)
        self.events = events
        self._sending = asyncio.Lock()

    async def send_events(self) -> None:
        async with self._sending:  # a checkpoint may be reported while a step is
            while self.events:
                await self.report(self.events[0])
                del self.events[0]

    async def checkpointed(self, step: int) -> None:
        await self.send_events()
        await super().checkpointed(step)
