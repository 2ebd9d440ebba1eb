"""What the trainer's loop asks of its policy: train a batch, hand over weights, save, load. `OneRank` does it in this
process; `offbeat.trainer.gang` does it with several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from offbeat.ledger.records import Batch
from offbeat.trainer.checkpoint import CheckpointManifest, Checkpoints, random_states
from offbeat.trainer.microbatch_size import MicrobatchSize
from offbeat.trainer.packing import samples_of
from offbeat.trainer.policy import Policy
from offbeat.trainer.snapshot import Snapshot
from offbeat.trainer.step import StepMetrics, StepSettings, train_step

Save = Callable[..., Path]
"""Writes a checkpoint whose state was taken before; with `keeps_all`, deletes no older one."""


class Training(Protocol):
    """The ranks that train a policy, as the trainer's loop sees them."""

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates begun since the start of this process."""
        ...

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        """Trains on a batch; see `offbeat.trainer.step.train_step`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the tensors of the next version, which training may change."""
        ...

    def copied(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Returns these tensors as copies that training does not change; None if there is no memory for them."""
        ...

    def begin_save(self, step: int, version: int) -> tuple[Save, bool]:
        """Takes the state for a checkpoint. Returns a function that writes the checkpoint, and whether training may go
        on meanwhile."""
        ...

    def load(self, step: int) -> CheckpointManifest:
        """Goes back to the checkpoint of `step`, and returns its manifest."""
        ...


class OneRank:
    """A policy that one process trains."""

    def __init__(
        self,
        policy: Policy,
        reference: PreTrainedModel | None,
        settings: StepSettings,
        size: MicrobatchSize,
        checkpoints: Checkpoints,
    ):
        self.policy, self.reference, self.settings, self.size = policy, reference, settings, size
        self.checkpoints = checkpoints
        self._state, self._weights = Snapshot("a checkpoint"), Snapshot("a version")

    @property
    def num_updates(self) -> int:
        return self.policy.num_updates

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        return train_step(self.policy, samples_of(batch), self.settings, lr, self.reference, weights_of, self.size)

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.published

    def copied(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return self._weights.take(weights)

    def begin_save(self, step: int, version: int) -> tuple[Save, bool]:
        state = {**self.policy.state(), **random_states()}
        copied = self._state.take(state)
        return partial(self.checkpoints.save, step, version, state if copied is None else copied), copied is not None

    def load(self, step: int) -> CheckpointManifest:
        manifest, state = self.checkpoints.load(step)
        self.policy.load_state(state)
        return manifest
