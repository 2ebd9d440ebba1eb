"""The trainer's process: `offbeat trainer --join URL`.

It keeps checkpoints in its own folder, and sends metrics and events to the coordinator. It also sends versions if it
shares neither a disk nor a store with the coordinator. When asked to stop, it finishes the current step and ends with a
checkpoint.

A trainer may have several ranks, started with torchrun's environment variables. Rank 0 is what is said above; the
others get their configuration and all further orders from it (`follow_rank_0`), and ignore signals to stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteTrainer
from offbeat.config import Config, from_dict, load, resolved
from offbeat.launch import wiring
from offbeat.launch.gpu_memory import LOCK, num_servers, taking_turns
from offbeat.launch.joining import Invitation, joined, report_run_over
from offbeat.launch.stopping import Stopping, interruptible
from offbeat.observability.metrics import EVENT, RANK_SECONDS, step_row
from offbeat.observability.trace import Trace
from offbeat.waiting import unless
from offbeat.weights.piece_store import PieceStore

if TYPE_CHECKING:
    from torch.distributed import Store
    from transformers import PreTrainedModel

    from offbeat.trainer.checkpoint import Checkpoints
    from offbeat.trainer.gang import GangLeader
    from offbeat.trainer.microbatch_size import MicrobatchSize
    from offbeat.trainer.policy import Policy
    from offbeat.trainer.ranks import Gang, RankPlace
    from offbeat.trainer.trainer import TrainerSettings
    from offbeat.weights.version import Adapter

log = logging.getLogger(__name__)

KEY = "signing.key"
"""File in the trainer's folder with the key that signs its manifests."""


async def train(
    invitation: Invitation,
    overrides: Sequence[str],
    run: Path | None,
    *,
    from_scratch: bool = False,
    place: RankPlace | None = None,
) -> str | None:
    """Joins a run and trains until the run ends. Returns None, or the reason if this trainer was stopped before.

    `run` is the coordinator's run folder if both share a disk; None: they do not. With `from_scratch`, the run starts
    again from step 0 if this trainer has no checkpoint of it. `place` is that of rank 0 among several ranks; None: this
    process trains alone.
    """
    async with AsyncExitStack() as stack:
        member = await stack.enter_async_context(joined(invitation, overrides))
        config, folder = member.config, invitation.folder
        events: list[dict[str, Any]] = []

        def event(kind: str, **fields: Any) -> None:
            events.append({EVENT: kind, **fields})

        with interruptible(), taking_turns(run / LOCK if run and num_servers(config) else None):
            from offbeat.launch import model_parts
            from offbeat.trainer.trainer import StepReport, Trainer

            home = run or folder
            if place is None and config.trainer.ranks > 1:
                log.warning(
                    "trainer.ranks = %d counts for offbeat train; this trainer has one rank, start more with torchrun",
                    config.trainer.ranks,
                )
            gang = None if place is None else _gather_gang(place, config, folder, home, is_away=run is None)
            parts = _make_parts(config, folder, event, gang)
        weights = model_parts.make_publisher(config, home / "weights", folder / KEY, parts.adapter, is_away=run is None)
        own = None if config.weights.store else weights.store  # a shared store needs no uploads
        signer = "" if weights.key is None else weights.key.public
        client = _Client(member.connection, events, shares_disk=run is not None, store=own, signer=signer)
        trace = Trace(folder / "trainer-trace.json")
        stack.callback(trace.close)
        num_siblings = config.batch.siblings

        leader: GangLeader | None = None

        async def on_step(report: StepReport) -> None:
            await client.send_events()
            row = step_row(report, trace.spans_since_last(), num_siblings)
            await client.report(row if leader is None else row | {RANK_SECONDS: leader.train_s})
            trace.flush()

        if gang is not None:
            from offbeat.trainer.gang import GangLeader

            leader = GangLeader(gang, *parts.training, weights=home / "weights")
            stack.callback(leader.end)
        trainer = Trainer(
            client,
            parts.policy,
            weights,
            parts.checkpoints,
            parts.settings,
            reference=parts.reference,
            size=parts.size,
            training=leader,
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


def follow_rank_0(place: RankPlace, overrides: Sequence[str]) -> None:
    """Trains as one of several ranks, but not rank 0, until rank 0 ends. The configuration is rank 0's; of `overrides`,
    only the longest wait for rank 0 counts."""
    from offbeat.trainer.gang import Rank, follow
    from offbeat.trainer.ranks import meet, told

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when all of them end
    within_s = load(None, overrides).trainer.start_within_s
    store = meet(place, within_s)
    run = json.loads(told(store, place.rank, within_s))
    config = from_dict(run["config"])
    gang = _join_gang(place, store, config)
    folder = Path(run["folder"])
    gang.check_folder(folder)
    parts = _make_parts(config, folder, lambda kind, **fields: None, gang)
    has_pieces = wiring.publishes_pieces(config, is_away=run["is_away"])
    pieces = wiring.open_pieces(config, Path(run["home"]) / "weights") if has_pieces else None
    follow(Rank(gang, *parts.training, store=pieces))


def _gather_gang(place: RankPlace, config: Config, folder: Path, home: Path, *, is_away: bool) -> Gang:
    """Waits for the other ranks, tells them the configuration, and returns the gang."""
    from offbeat.trainer.ranks import meet, tell

    store = meet(place, config.trainer.start_within_s)
    told = {"config": resolved(config), "folder": str(folder), "home": str(home), "is_away": is_away}
    tell(store, place.size, json.dumps(told).encode(), folder, config.trainer.start_within_s)
    gang = _join_gang(place, store, config)
    gang.check_folder(folder)
    return gang


def _join_gang(place: RankPlace, store: Store, config: Config) -> Gang:
    from offbeat.launch import model_parts
    from offbeat.model.devices import rank_device
    from offbeat.trainer.ranks import join_gang

    model_parts.prepare_torch(config)  # before a GPU is first used
    settings = config.trainer
    device = rank_device(config.model.device, place.local_rank)
    return join_gang(place, store, device, timeout_s=settings.timeout_s, lost_after_s=settings.lost_after_s)


def _make_parts(config: Config, folder: Path, event: Callable[..., None], gang: Gang | None) -> _Parts:
    """Makes this rank's parts of a trainer, whose checkpoints are in `folder`."""
    from offbeat.launch import model_parts
    from offbeat.trainer.checkpoint import Checkpoints

    model_parts.prepare_torch(config)
    model = model_parts.load(config) if gang is None else model_parts.load_for_gang(config)
    if gang is not None:
        adapter = model_parts.make_adapter(config, model, is_divided=True)
    policy, reference = model_parts.make_policy(config, model, gang)
    if gang is None:
        adapter = model_parts.make_adapter(config, policy.model)
    return _Parts(
        policy,
        reference,
        model_parts.trainer_settings(config),
        model_parts.make_microbatch_size(config, policy, folder, event),
        Checkpoints(folder / "checkpoints", config.checkpoint.keep, adapter),
        adapter,
    )


@dataclass(frozen=True)
class _Parts:
    policy: Policy
    reference: PreTrainedModel | None
    settings: TrainerSettings
    size: MicrobatchSize
    checkpoints: Checkpoints
    adapter: Adapter | None

    @property
    def training(self) -> tuple[Any, ...]:
        """The arguments of `OneRank` and its kinds."""
        return self.policy, self.reference, self.settings.step, self.size, self.checkpoints


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
