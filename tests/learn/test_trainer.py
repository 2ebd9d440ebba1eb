"""What was learned is saved, whatever brings the run down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

import numpy as np
import pytest
from models import tiny_model

from offbeat.learn.checkpoint import Checkpoints
from offbeat.learn.packing import pack
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.samples import Sample
from offbeat.learn.step import StepSettings
from offbeat.learn.trainer import MAX_CLAMPED_SHARE, Trainer, TrainerSettings
from offbeat.ledger.records import Batch, BatchGroup, Member, Reconciled
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

    async def reconcile(self, step, version):
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


class Feeding(Waiting):
    """A coordinator that hands out one batch a step and takes down what is committed."""

    def __init__(self, batches):
        self.batches, self.number = list(batches), -1
        self.committed = []

    async def next_version(self):
        self.number += 1
        return self.number

    async def claim(self, step, within_s):
        return self.batches[step]

    async def commit(self, step, version, audited=(), compared=()):
        self.committed.append((list(audited), list(compared)))


def a_batch(step: int, members) -> Batch:
    return Batch(step, step, tuple(BatchGroup(m.task, i, "sums", (m,)) for i, m in enumerate(members)))


def a_member(policy: Policy, task: int, age: int, off_by: float = 0.0, kv_version: int = 0) -> Member:
    """An answer of version 0, which the policy is now, in two segments; its log-probs are off by so much."""
    trajectory = Trajectory(task, np.arange(1, 5), max_new_tokens=9)
    tokens = np.random.default_rng(task).integers(1, 40, 6)
    sample = Sample(0, trajectory.prompt, tokens, np.zeros(6, np.float32), np.ones(6, bool), 0.0)
    logprobs = policy.logprobs(pack([sample], [0], policy.device)).numpy() - off_by
    for start, end in ((0, 2), (2, 6)):
        trajectory.append(
            Segment(start, tokens[start:end], logprobs=logprobs[start:end], version=0, kv_version=kv_version)
        )
    trajectory.finish(End.STOP)
    return Member(task, 0, trajectory, (Reward(1.0),), 1.0, np.full(6, age, np.int32))


def run_steps(tmp_path, policy, batches, **how) -> tuple[Feeding, list]:
    client, told = Feeding(batches), []
    step = StepSettings(max_sample_gap=1.0, audit_share=1.0)
    settings = replace(SETTINGS, step=step, num_steps=len(batches), learning_rate=lambda step: 0.3, **how)

    async def on_step(report): ...

    async def scenario():
        trainer = Trainer(
            client,
            policy,
            Publisher(tmp_path / "weights"),
            Checkpoints(tmp_path / "checkpoints"),
            settings,
            reference=None,
            span=lambda name: contextlib.nullcontext(),
            event=lambda name, **fields: told.append((name, fields)),
            on_step=on_step,
        )
        await trainer.start()
        await trainer.run(asyncio.Event())

    asyncio.run(scenario())
    return client, told


def test_claiming_the_version_before_does_not_evade_the_audit(tmp_path):
    policy = Policy(tiny_model("llama"), AdamSettings())
    fresh = [a_member(policy, 1, 0), a_member(policy, 2, 0, off_by=2.0)]
    old = [a_member(policy, 3, 1), a_member(policy, 4, 1, off_by=2.0)]
    client, _ = run_steps(tmp_path, policy, [a_batch(0, fresh), a_batch(1, old)], num_witnesses=2)
    for (audited, compared), (honest, forger) in zip(client.committed, ((1, 2), (3, 4)), strict=True):
        assert audited == [forger]
        assert compared == [(honest, 0, 2, 0), (honest, 2, 4, 0), (forger, 0, 2, 2), (forger, 2, 4, 4)]


def test_segments_with_keys_and_values_of_older_weights_are_not_audited(tmp_path):
    policy = Policy(tiny_model("llama"), AdamSettings())
    trajectory = a_member(policy, 1, 0, off_by=2.0).trajectory
    first, second = (replace(segment, version=1) for segment in trajectory.segments)
    mixed = replace(trajectory, segments=(first, replace(second, kv_version=1)))
    member = replace(a_member(policy, 1, 0), trajectory=mixed)
    client, _ = run_steps(tmp_path, policy, [a_batch(0, [member])])
    assert client.committed == [([1], [(1, 2, 4, 4)])]


def test_an_alarm_tells_of_log_ratios_beyond_the_clamp(tmp_path):
    policy = Policy(tiny_model("llama"), AdamSettings())
    far, near = a_member(policy, 1, 1, off_by=30.0), a_member(policy, 2, 1)
    _, told = run_steps(tmp_path, policy, [a_batch(0, [far, near])])
    assert ("clamped", {"step": 0, "share": 0.5, "limit": MAX_CLAMPED_SHARE}) in told
    _, told = run_steps(tmp_path / "other", Policy(tiny_model("llama"), AdamSettings()), [a_batch(0, [near])])
    assert "clamped" not in [name for name, _ in told]
