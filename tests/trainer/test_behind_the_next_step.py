"""Checkpoints and versions are written while the next step is made, and nobody can tell from what is on the disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import pytest
import torch
from training_scenes import GOOD, SETTINGS, Handing, batch, make_trainer

from offbeat.errors import DiskError, RunStopped
from offbeat.trainer import snapshot
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.losses import clip
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.step import StepSettings
from offbeat.weights.publish import Publisher

WITHIN_S = 30.0


class Diary:
    """What has happened, in order, in whatever thread."""

    def __init__(self):
        self.told: list[str] = []
        self._changed = threading.Condition()

    def tell(self, what: str) -> None:
        with self._changed:
            self.told.append(what)
            self._changed.notify_all()

    def wait_for(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self.told, WITHIN_S), f"no {what}, only {self.told}"

    def before(self, what: str) -> list[str]:
        return self.told[: self.told.index(what)]


class Ledger(Handing):
    """A coordinator that refuses what the ledger would refuse."""

    def __init__(self, diary: Diary, num_steps: int):
        super().__init__(*(batch(step, GOOD, GOOD) for step in range(num_steps)))
        self.diary, self.digests, self.step = diary, [], 0
        self.reported: list[int] = []

    async def claim(self, step, within_s):
        assert step <= self.step + 1, f"step {step} is claimed, but the latest version is of step {self.step}"
        return await super().claim(step, within_s)

    async def commit(self, step, version, audited=(), compared=()):
        assert (step, version.step) == (self.step, step + 1)
        self.step = version.step
        self.digests.append(version.digest)
        self.diary.tell(f"version {version.step}")

    async def checkpointed(self, step):
        self.reported.append(step)


class SlowCheckpoints(Checkpoints):
    """A disk that takes for each checkpoint until something has happened."""

    def __init__(self, folder, diary: Diary, until: dict[int, str], keep: int = 2):
        super().__init__(folder, keep)
        self.diary, self.until = diary, until

    def save(self, step, *args, **how):
        self.diary.tell(f"begin {step}")
        if step in self.until:
            self.diary.wait_for(self.until[step])
        super().save(step, *args, **how)
        self.diary.tell(f"saved {step}")


class SlowPublisher(Publisher):
    """A disk that takes for each version until something has happened."""

    def __init__(self, folder, diary: Diary, until: dict[int, str]):
        super().__init__(folder)
        self.diary, self.until = diary, until

    def write(self, number, step, parent, tensors):
        self.diary.tell(f"writing {step}")
        if step in self.until:
            self.diary.wait_for(self.until[step])
        return super().write(number, step, parent, tensors)


def make(folder, num_steps, *, checkpoints=None, versions=None, fails=None, **how):
    """A trainer whose steps are told in a diary as they begin. `checkpoints` and `versions` hold, by step, what has to
    happen before these are on the disk. `fails` is an error that the second step raises."""
    diary = Diary()

    def telling(tokens, settings):
        diary.tell(f"begin step {trainer.step + 1}")
        if fails is not None and trainer.step == 1:
            raise fails
        return clip(tokens, settings)

    how = {"checkpoint_every": 1 if checkpoints is not None else 0, **how}
    settings = replace(SETTINGS, num_steps=num_steps, step=StepSettings(policy_loss=telling), **how)
    trainer = make_trainer(folder, Ledger(diary, num_steps), settings=settings)
    trainer.checkpoints = trainer.training.checkpoints = SlowCheckpoints(
        folder / "checkpoints", diary, checkpoints or {}
    )
    trainer.weights = SlowPublisher(folder / "weights", diary, versions or {})
    return trainer, diary


def train(trainer, stop: asyncio.Event | None = None) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(2 * WITHIN_S):
            await trainer.start()
            await trainer.run(stop or asyncio.Event())

    asyncio.run(scenario())


def states(trainer) -> list[dict[str, torch.Tensor]]:
    """The trainer's state after each of its steps, from when it is run on."""
    found = []

    async def remember(report):
        found.append({name: tensor.clone() for name, tensor in trainer.policy.state().items()})

    trainer.on_step = remember
    return found


def equal(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


# --- checkpoints ---


def test_the_next_step_trains_while_a_checkpoint_is_written(tmp_path):
    trainer, diary = make(tmp_path, 3, checkpoints={1: "version 2"})
    train(trainer)
    assert {"begin 1", "begin step 2", "version 2"} <= set(diary.before("saved 1"))
    assert trainer.checkpoints.steps() == [2, 3]


def test_a_checkpoint_holds_the_state_of_its_step_though_training_goes_on(tmp_path):
    trainer, _ = make(tmp_path, 2, checkpoints={1: "version 2"})
    seen = states(trainer)
    train(trainer)
    for step, state in enumerate(seen, start=1):
        assert equal(trainer.checkpoints.load(step)[1], state)
    assert not equal(*seen)


def test_a_checkpoint_holds_the_random_state_of_its_step_though_training_goes_on(tmp_path):
    torch.manual_seed(5)
    trainer, _ = make(tmp_path, 2, checkpoints={1: "version 2"})
    drawn = []

    async def draw(report):
        drawn.append(torch.rand(3))  # as a user's loss may

    trainer.on_step = draw
    train(trainer)
    trainer.checkpoints.load(1)
    assert torch.equal(torch.rand(3), drawn[1])


def test_only_one_checkpoint_at_a_time_is_being_written(tmp_path):
    trainer, diary = make(tmp_path, 4, checkpoints={1: "version 2", 2: "version 3"})
    train(trainer)
    writes = [what for what in diary.told if what.startswith(("begin ", "saved ")) and "step" not in what]
    assert writes == [f"{what} {step}" for step in (1, 2, 3, 4) for what in ("begin", "saved")]
    assert diary.told.index("version 2") < diary.told.index("saved 1") < diary.told.index("begin 2")


def test_a_checkpoint_is_reported_and_older_ones_go_when_it_is_on_disk_and_not_before(tmp_path):
    trainer, _ = make(tmp_path, 3, checkpoints={2: "version 3"})
    trainer.checkpoints.keep = 1
    seen = {}

    async def look(report):
        seen[report.step + 1] = (trainer.checkpoints.steps(), list(trainer.client.reported))

    trainer.on_step = look
    train(trainer)
    assert seen[3] == ([1], [1]), "the checkpoint of step 2 is being written"
    assert trainer.checkpoints.steps() == trainer.client.reported[-1:] == [3]


def test_a_stop_waits_for_the_checkpoint_being_written(tmp_path):
    stop = asyncio.Event()
    trainer, _ = make(tmp_path, 9, checkpoints={1: "step 2 is over"})

    async def press(report):
        if report.step == 1:
            stop.set()
            trainer.checkpoints.diary.tell("step 2 is over")

    trainer.on_step = press
    train(trainer, stop)
    assert trainer.checkpoints.steps() == [1, 2]
    assert trainer.client.reported == [1, 2]


def test_a_step_that_fails_waits_for_the_checkpoint_being_written(tmp_path):
    trainer, diary = make(tmp_path, 2, checkpoints={1: "begin step 2"}, fails=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        train(trainer)
    assert diary.told[-1] == "saved 1"
    assert trainer.client.reported == trainer.checkpoints.steps() == [1]


class FullDisk(SlowCheckpoints):
    def save(self, step, *args, **how):
        if step in self.until:
            self.diary.wait_for(self.until[step])
            raise DiskError(f"cannot write the checkpoint of step {step}: no space")
        super().save(step, *args, **how)


def test_a_checkpoint_that_fails_behind_a_step_ends_the_run_before_another_begins(tmp_path, caplog):
    trainer, diary = make(tmp_path, 9, checkpoints={})
    trainer.checkpoints = trainer.training.checkpoints = FullDisk(tmp_path / "checkpoints", diary, {2: "version 3"})
    trainer.settings = replace(trainer.settings, checkpoint_every=2)
    with pytest.raises(DiskError, match="cannot write the checkpoint of step 2: no space"):
        train(trainer)
    assert trainer.client.step in (3, 4), "the step under way is finished, and no other is begun"
    assert trainer.checkpoints.steps() == []
    assert caplog.records == [], "it is told once"


def test_a_checkpoint_that_fails_ends_the_wait_for_a_batch(tmp_path):
    trainer, diary = make(tmp_path, 9, checkpoints={})
    trainer.checkpoints = trainer.training.checkpoints = FullDisk(tmp_path / "checkpoints", diary, {1: "claimed 2"})

    class Slow(Ledger):
        async def claim(self, step, within_s):
            self.diary.tell(f"claimed {step + 1}")
            return await (super().claim(step, within_s) if step == 0 else asyncio.sleep(within_s))

    trainer.client = Slow(diary, 9)
    with pytest.raises(DiskError, match="step 1"):
        train(trainer)


def test_where_the_host_has_no_memory_for_a_copy_training_waits_and_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "host_memory", lambda: (1000, 10**9))
    trainer, diary = make(tmp_path, 3, checkpoints={})
    with caplog.at_level(logging.WARNING):
        train(trainer)
    assert {"saved 1"} <= set(diary.before("begin step 2"))
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("training waits while a checkpoint is written: a copy of 0.0 GB does not fit")
    assert trainer.checkpoints.steps() == [2, 3]


# --- versions ---

AHEAD = {"claim_ahead": True}


def test_the_next_step_trains_while_a_version_is_written_if_its_batch_is_there(tmp_path):
    trainer, diary = make(tmp_path, 3, versions={1: "begin step 2", 2: "begin step 3"}, **AHEAD)
    train(trainer)
    assert [what for what in diary.told if what.startswith("version")] == ["version 1", "version 2", "version 3"]
    assert trainer.version.step == 3


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_version_is_committed_before_the_next_claim_if_no_batch_is_there(tmp_path, num_steps):
    trainer, diary = make(tmp_path, num_steps)
    train(trainer)
    expected = [(f"begin step {i}", f"writing {i}", f"version {i}") for i in range(1, num_steps + 1)]
    told = [what for what in diary.told if what not in ("writing 0", f"begin {num_steps}", f"saved {num_steps}")]
    assert told == [what for of_step in expected for what in of_step]


def test_versions_written_behind_a_step_have_the_bits_of_those_that_training_waits_for(tmp_path):
    waiting, _ = make(tmp_path / "waiting", 4)
    train(waiting)
    behind, _ = make(tmp_path / "behind", 4, versions={i: f"begin step {i + 1}" for i in (1, 2, 3)}, **AHEAD)
    train(behind)
    assert behind.client.digests == waiting.client.digests
    assert len(set(behind.client.digests)) == 4


def test_a_step_with_a_checkpoint_publishes_its_version_first(tmp_path):
    trainer, diary = make(tmp_path, 3, checkpoints={1: "begin step 2"}, **AHEAD)
    train(trainer)
    assert {"version 1", "begin 1"} <= set(diary.before("begin step 2"))
    assert diary.before("begin 1")[-1] == "version 1"


class FullFolder(SlowPublisher):
    def write(self, number, step, parent, tensors):
        if step == 2:
            self.diary.wait_for("begin step 3")
            raise DiskError("cannot write the weights of step 2: no space")
        return super().write(number, step, parent, tensors)


def test_a_version_that_fails_behind_a_step_ends_the_run_and_its_weights_are_in_no_checkpoint(tmp_path, caplog):
    trainer, diary = make(tmp_path, 9, **AHEAD)
    trainer.weights = FullFolder(tmp_path / "weights", diary, {})
    with pytest.raises(DiskError, match="cannot write the weights of step 2: no space"):
        train(trainer)
    assert (trainer.client.step, trainer.checkpoints.steps()) == (1, [])
    assert "begin step 4" not in diary.told
    assert caplog.records == []


def test_a_step_that_fails_while_the_version_before_is_written_leaves_a_checkpoint_of_that_version(tmp_path):
    trainer, _ = make(tmp_path, 3, versions={1: "begin step 2"}, fails=ZeroDivisionError(), **AHEAD)
    seen = states(trainer)
    with pytest.raises(ZeroDivisionError):
        train(trainer)
    assert trainer.client.step == 1
    manifest, state = trainer.checkpoints.load(1)
    assert (manifest.version, equal(state, seen[0])) == (trainer.version.number, True)


def test_a_step_that_is_not_finite_while_the_version_before_is_written_names_that_version(tmp_path):
    trainer, _ = make(tmp_path, 3, versions={1: "begin step 2"}, fails=NotFinite("the loss"), **AHEAD)
    with pytest.raises(RunStopped, match=r"step 2: the loss is not finite; .*from version 2"):
        train(trainer)
    assert trainer.checkpoints.steps() == [1]
