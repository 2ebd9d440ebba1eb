"""What was learned is saved, whatever brings the run down."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from models import tiny_model

from offbeat.errors import UserError
from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.step import StepSettings
from offbeat.learn.trainer import Trainer, TrainerSettings
from offbeat.ledger.records import Reconciled
from offbeat.weights.publish import Publisher

SETTINGS = TrainerSettings(
    num_steps=9,
    step=StepSettings(),
    learning_rate=lambda step: 1e-3,
    checkpoint_every=0,
    claim_within_s=60.0,
    max_logprob_gap=1.0,
)


class Waiting:
    """A coordinator that never has a batch."""

    async def next_version(self):
        return 0

    async def publish(self, version): ...

    async def reconcile(self, step, version, *, home, from_scratch):
        return Reconciled(step, None, False)

    async def checkpointed(self, step): ...

    async def claim(self, step, within_s):
        await asyncio.sleep(within_s)


class SlowDisk(Checkpoints):
    def save(self, *args, **how):
        time.sleep(0.2)
        super().save(*args, **how)


class Listening(Waiting):
    """A coordinator that remembers how trainers introduced themselves."""

    def __init__(self):
        self.heard = []

    async def reconcile(self, step, version, *, home, from_scratch):
        self.heard.append((step, version, home, from_scratch))
        return Reconciled(step, None, False)


def make_trainer(folder, client, told=None):
    return Trainer(
        client,
        Policy(tiny_model("llama"), AdamSettings()),
        Publisher(folder / "weights"),
        Checkpoints(folder / "checkpoints"),
        SETTINGS,
        reference=None,
        span=lambda name: contextlib.nullcontext(),
        event=lambda name, **_: None if told is None else told.append(name),
        on_step=lambda report: None,
    )


def test_a_trainer_is_known_by_the_place_of_its_checkpoints(tmp_path):
    coordinator = Listening()
    for place in ("a", "a", "b"):
        asyncio.run(make_trainer(tmp_path / place, coordinator).start())
    (_, _, first, _), (_, _, again, _), (_, _, other, _) = coordinator.heard
    assert first == again != other
    assert len(first) >= 16


def test_to_begin_from_scratch_beside_a_checkpoint_is_refused_before_anyone_hears_of_it(tmp_path):
    coordinator = Listening()
    trainer = make_trainer(tmp_path, coordinator)
    trainer.checkpoints.save(7, 7, trainer.policy.state())
    with pytest.raises(UserError, match=r"--from-scratch: .*checkpoints has a checkpoint of step 7; go on from it"):
        asyncio.run(trainer.start(from_scratch=True))
    assert coordinator.heard == []


def test_being_cancelled_again_while_saving_does_not_stop_the_checkpoint(tmp_path):
    told: list[str] = []

    async def scenario():
        trainer = Trainer(
            Waiting(),
            Policy(tiny_model("llama"), AdamSettings()),
            Publisher(tmp_path / "weights"),
            SlowDisk(tmp_path / "checkpoints"),
            SETTINGS,
            reference=None,
            span=lambda name: contextlib.nullcontext(),
            event=lambda name, **_: told.append(name),
            on_step=lambda report: None,
        )
        await trainer.start()
        running = asyncio.create_task(trainer.run(asyncio.Event()))
        for _ in range(3):  # another part fails, and then the parts that fail with it
            await asyncio.sleep(0.05)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert trainer.saved_step == 0

    asyncio.run(scenario())
    assert told == ["checkpoint"]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0]
