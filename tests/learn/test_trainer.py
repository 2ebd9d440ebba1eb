"""What was learned is saved, whatever brings the run down."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from models import tiny_model

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
