"""A trainer of a tiny model, and coordinators in memory that give it batches."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
from learning_models import tiny_model

from offbeat.ledger.records import Batch, BatchGroup, Member, Reconciled
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings
from offbeat.trainer.trainer import Trainer, TrainerSettings
from offbeat.trajectory import End, Reward, Segment, Trajectory
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


class Handing(Waiting):
    """A coordinator with one batch for each step."""

    def __init__(self, *batches):
        self.batches, self.num_versions = batches, 0
        self.committed = None

    async def next_version(self):
        self.num_versions += 1
        return self.num_versions

    async def claim(self, step, within_s):
        return self.batches[step]

    async def commit(self, step, version, audited=(), compared=()):
        self.committed = step


def batch(step, *groups):
    """A batch of groups of answers, each given as its tokens."""
    made = []
    for i, answers in enumerate(groups):
        members = []
        for j, tokens in enumerate(answers):
            trajectory = Trajectory(10 * i + j, np.arange(1, 4), max_new_tokens=9)
            logprobs = np.full(len(tokens), -3.0, np.float32)
            trajectory.append(Segment(0, np.array(tokens), logprobs=logprobs, version=0, kv_version=0), End.STOP)
            fresh = np.zeros(len(tokens), np.int32)
            members.append(Member(10 * i + j, j, trajectory, (Reward(float(j)),), float(j), fresh))
        made.append(BatchGroup(i, i, "sums", tuple(members)))
    return Batch(step, 0, tuple(made))


async def ignore(report): ...


def make_trainer(folder, client, told=None, settings=SETTINGS):
    return Trainer(
        client,
        Policy(tiny_model("llama"), AdamSettings()),
        Publisher(folder / "weights"),
        Checkpoints(folder / "checkpoints"),
        settings,
        reference=None,
        span=lambda name: contextlib.nullcontext(),
        event=lambda name, **_: None if told is None else told.append(name),
        on_step=ignore,
    )


GOOD = ([4, 5, 6], [7, 8])
