"""What was learned is saved, whatever brings the run down."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from training_scenes import GOOD, SETTINGS, Handing, Waiting, batch, make_trainer

from offbeat.errors import UserError
from offbeat.ledger.records import Batch, BatchGroup, Member, Reconciled
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.losses import clip
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings
from offbeat.trainer.trainer import MAX_CLAMPED_SHARE, Trainer
from offbeat.trajectory import End, Reward, Segment, Trajectory
from offbeat.weights.publish import Publisher


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
        trainer = make_trainer(tmp_path, Waiting(), told=told)
        trainer.checkpoints = trainer.training.checkpoints = SlowDisk(tmp_path / "checkpoints")
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


BEYOND_THE_VOCABULARY = ([4, 5, 6], [7, 1000])


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_a_step_that_fails_on_its_data_leaves_a_checkpoint_of_all_that_was_learnt_before_it(tmp_path, updates_per_step):
    settings = replace(SETTINGS, step=StepSettings(updates_per_step=updates_per_step))
    client = Handing(batch(0, GOOD, GOOD), batch(1, GOOD, BEYOND_THE_VOCABULARY), batch(1, GOOD, GOOD))
    trainer = make_trainer(tmp_path, client, settings=settings)
    told: list[dict] = []

    async def scenario():
        await trainer.start()
        trainer.on_step = remember
        await trainer.run(asyncio.Event())

    async def remember(report):
        told.append({name: tensor.clone() for name, tensor in trainer.policy.state().items()})

    with pytest.raises(IndexError):
        asyncio.run(scenario())
    assert trainer.checkpoints.steps() == [1]
    _, saved = trainer.checkpoints.load(1)
    assert saved.keys() == told[0].keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in told[0].items())
    assert asyncio.run(make_trainer(tmp_path, client).start()) == 1, "and the run goes on from there"


def test_a_step_that_fails_after_an_update_of_its_own_is_not_saved_half_way(tmp_path):
    num_calls = 0

    def raising(tokens, settings):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ZeroDivisionError
        return clip(tokens, settings)

    settings = replace(SETTINGS, step=StepSettings(updates_per_step=2, policy_loss=raising))
    trainer = make_trainer(tmp_path, Handing(batch(0, GOOD, GOOD)), settings=settings)

    async def scenario():
        await trainer.start()
        await trainer.run(asyncio.Event())

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
    assert num_calls == 2
    assert trainer.checkpoints.steps() == []


@pytest.mark.parametrize("was_asked_to_stop", [False, True])
def test_a_step_under_way_when_another_part_fails_is_finished_and_saved_unless_nobody_waits(
    tmp_path, was_asked_to_stop
):
    training, may_end = threading.Event(), threading.Event()

    def slow(tokens, settings):
        training.set()
        assert may_end.wait(30)
        return clip(tokens, settings)

    settings = replace(SETTINGS, step=StepSettings(policy_loss=slow))
    trainer = make_trainer(tmp_path, Handing(batch(0, GOOD)), settings=settings)

    async def scenario():
        await trainer.start()
        stop = asyncio.Event()
        running = asyncio.create_task(trainer.run(stop))
        assert await asyncio.to_thread(training.wait, 30)
        if was_asked_to_stop:
            stop.set()
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(0.01)
        assert running.done() == was_asked_to_stop
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert trainer.checkpoints.steps() == ([] if was_asked_to_stop else [1])
    assert trainer.client.committed == (None if was_asked_to_stop else 0)


def test_a_step_that_fails_half_way_after_another_part_has_failed_is_not_saved(tmp_path):
    training, may_end = threading.Event(), threading.Event()
    num_calls = 0

    def raising(tokens, settings):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            training.set()
            assert may_end.wait(30)
            raise ZeroDivisionError
        return clip(tokens, settings)

    settings = replace(SETTINGS, step=StepSettings(updates_per_step=2, policy_loss=raising))
    trainer = make_trainer(tmp_path, Handing(batch(0, GOOD, GOOD)), settings=settings)

    async def scenario():
        await trainer.start()
        running = asyncio.create_task(trainer.run(asyncio.Event()))
        assert await asyncio.to_thread(training.wait, 30)
        running.cancel()
        await asyncio.sleep(0.01)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert trainer.policy.num_updates == 1
    assert trainer.checkpoints.steps() == []


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
    assert ("clamped", {"step": 1, "share": 0.5, "limit": MAX_CLAMPED_SHARE}) in told
    _, told = run_steps(tmp_path / "other", Policy(tiny_model("llama"), AdamSettings()), [a_batch(0, [near])])
    assert "clamped" not in [name for name, _ in told]
