"""A policy that several ranks train together: rank 0 gives orders, and all carry them out.

`GangLeader`, on rank 0, is what the trainer's loop calls (`offbeat.trainer.trainer.Training`). It gives each task as an
order to the other ranks (`follow`), and does its own part. Between orders the others wait; no collective is under way
while rank 0 waits for the network.

What all ranks meet alike, such as NaN, they raise alike, and go on. Any other error ends the rank that met it, and with
it the gang, which then starts again from the last checkpoint.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from offbeat.errors import OffbeatError, UserError
from offbeat.ledger.records import Batch
from offbeat.testing.crash_points import crash_here
from offbeat.trainer.checkpoint import (
    RNG,
    CheckpointManifest,
    random_state_of,
    random_states,
    restore_random,
)
from offbeat.trainer.layer_clock import SlowRanks
from offbeat.trainer.ranks import Gang, RankLost
from offbeat.trainer.rounds import agreed, is_agreed
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepMetrics
from offbeat.trainer.trainer import OneRank, Save
from offbeat.trajectory import array_from_wire, array_to_wire
from offbeat.weights.divided import DividedTensors, serve_parts
from offbeat.weights.piece_store import PieceStore

log = logging.getLogger(__name__)

END_WITHIN_S = 5.0
"""Longest wait for an order that is still carried out when the gang is to end."""
TRAIN, WEIGHTS, SAVE, LOAD, END = "train", "weights", "save", "load", "end"


class Rank(OneRank):
    """One rank's part in each task of a gang."""

    policy: ShardedPolicy

    def __init__(self, gang: Gang, *parts: Any, store: PieceStore | None = None):
        """`store` is that of the versions' pieces; None: there is none. `parts` are the parameters of `OneRank`."""
        super().__init__(*parts)
        self.gang = gang
        self.store = store
        self.train_s: tuple[float, ...] = ()
        """Seconds that each rank took to train the latest step."""
        self._writing: threading.Thread | None = None
        self._is_serving = threading.Event()
        self._slow = SlowRanks()

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        self.policy.layer_clock.take()
        start_s = time.monotonic()
        metrics = super().train(batch, lr, weights_of)
        own = (time.monotonic() - start_s, self.policy.layer_clock.take())
        told = self.gang.gather(msgspec.msgpack.encode(own))
        ranks = [msgspec.msgpack.decode(data, type=tuple[float, tuple[float, int]]) for data in told]
        self.train_s = tuple(seconds for seconds, _ in ranks)
        passes = [one for _, one in ranks]
        for rank, times in self._slow.find(passes):
            if self.gang.rank == 0:
                where = self.gang.hosts[rank]
                log.warning("rank %d (%s) is %.1f times slower than the others, which wait for it", rank, where, times)
        return replace(metrics, rank_s=tuple(seconds for seconds, _ in passes))

    def save_rows(self, draft: Path) -> bool:
        """Takes this rank's state, and begins to write it; returns whether training may go on meanwhile."""
        state, starts = self.policy.held_state()
        if self.gang.rank == 0:
            state |= random_states()
        copied = self._state.take(state)
        can_go_on = not self.gang.agree("no memory for a copy" if copied is None else "")
        write = partial(self.checkpoints.save_rows, draft, self.gang.rank, state if copied is None else copied, starts)
        if can_go_on:
            self._writing = threading.Thread(target=write, name="checkpoint-rows")
            self._writing.start()
        else:
            write()
        return can_go_on

    def serve_weights(self, inbox: Path) -> None:
        """Takes this rank's parts of the next version, and publishes them when rank 0 asks for it in `inbox`."""
        _, own = self.policy.own_parts()
        self._is_serving.set()  # whoever serves an earlier version ends
        self._is_serving = over = threading.Event()
        given = (own, inbox, self.gang.rank, self.store, over.is_set)
        threading.Thread(target=serve_parts, args=given, name="parts-of-weights", daemon=True).start()

    def load_rows(self, step: int) -> CheckpointManifest:
        """Goes back to a checkpoint, of which each rank reads its rows, and a share of the files to verify them."""
        manifest, problem = self.checkpoints.read_manifest(step), ""
        try:
            for name in sorted(manifest.files)[self.gang.rank :: self.gang.size]:
                self.checkpoints.check_file(step, name, manifest)
        except OffbeatError as error:
            problem = str(error)
        if problems := self.gang.agree(problem):
            raise agreed(UserError(problems[0].partition(": ")[2]))
        tensors = self.checkpoints.read(step, manifest, self.policy.wanted_rows)
        states = {name: tensors.pop(name) for name in list(tensors) if name.startswith(RNG)}
        restore_random(random_state_of(states, self.gang.rank))
        self.policy.load_state(tensors)
        return manifest


class GangLeader(Rank):
    """Rank 0 of a gang: gives orders, and takes part in them."""

    def __init__(self, gang: Gang, *parts: Any, weights: Path):
        """`weights` is the folder of versions, which all ranks share."""
        super().__init__(gang, *parts)
        self._weights_folder = weights
        self._one_at_a_time = threading.Lock()
        self._is_out_of_step = False
        """Whether an error has ended this rank's part in an order that the others still carry out."""

    def train(self, batch: Batch, lr: float, weights_of: Callable[[int], Path | None]) -> StepMetrics:
        files = {number: str(file) for number in _versions_of(batch) if (file := weights_of(number)) is not None}
        body = msgspec.msgpack.encode({"lr": lr, "files": files, "batch": batch}, enc_hook=array_to_wire)
        return self._carry_out(TRAIN, body, lambda: super(GangLeader, self).train(batch, lr, weights_of))

    def weights(self) -> Mapping[str, Tensor]:
        inbox = self._weights_folder / f".ranks-{secrets.token_hex(4)}"
        for left in self._weights_folder.glob(".ranks-*"):  # of a gang that died
            shutil.rmtree(left, ignore_errors=True)
        inbox.mkdir(parents=True)
        shapes, own = self._carry_out(WEIGHTS, str(inbox).encode(), self.policy.own_parts)
        return DividedTensors(shapes, own, inbox, self.gang.size, self.gang.timeout_s)

    def copied(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        return weights  # parts that have memory of their own

    def begin_save(self, step: int, version: int) -> tuple[Save, bool]:
        draft = self.checkpoints.begin_rows(step)
        can_go_on = self._carry_out(SAVE, str(draft).encode(), partial(self.save_rows, draft))
        within_s = self.gang.timeout_s
        return partial(self.checkpoints.finish_rows, draft, step, version, self.gang.size, within_s), can_go_on

    def load(self, step: int) -> CheckpointManifest:
        return self._carry_out(LOAD, str(step).encode(), partial(self.load_rows, step))

    def end(self) -> None:
        """Ends the other ranks, if they wait for an order; otherwise they notice that this one has ended."""
        if not self._is_out_of_step and self._one_at_a_time.acquire(timeout=END_WITHIN_S):
            self.gang.order(END)
            self.gang.end()

    def _carry_out(self, kind: str, body: bytes, work: Callable[[], Any]) -> Any:
        """Gives an order and takes part in it by calling `work`; returns its result."""
        with self._one_at_a_time:
            if self._is_out_of_step:
                raise OffbeatError("the ranks are out of step after an error; start the trainer again")
            try:
                guarded(self.gang, lambda: self.gang.order(kind, body))
                crash_here("order-given")
                return guarded(self.gang, work)
            except BaseException as error:
                self._is_out_of_step = not is_agreed(error)
                raise


def follow(rank: Rank) -> None:
    """Carries out rank 0's orders until it ends the gang."""
    gang = rank.gang
    while True:
        kind, body = guarded(gang, gang.next_order)
        crash_here("order-received")
        match kind:
            case "train":  # the names of orders, as TRAIN, would be bound here
                order = msgspec.msgpack.decode(body, type=_TrainOrder, dec_hook=_from_wire)
                files = {number: Path(file) for number, file in order.files.items()}
                _unless_agreed(partial(guarded, gang, partial(rank.train, order.batch, order.lr, files.get)))
            case "weights":
                guarded(gang, partial(rank.serve_weights, Path(body.decode())))
            case "save":
                guarded(gang, partial(rank.save_rows, Path(body.decode())))
            case "load":
                _unless_agreed(partial(guarded, gang, partial(rank.load_rows, int(body))))
            case "end":
                gang.end()
                return
            case _:
                raise RankLost(f"rank {gang.rank}: unknown order {kind!r}; all ranks need the same version of Offbeat")


def _unless_agreed(work: Callable[[], Any]) -> None:
    """Calls `work`; passes over an error that all ranks have met, which rank 0 reports."""
    try:
        work()
    except Exception as error:
        if not is_agreed(error):
            raise


class _TrainOrder(msgspec.Struct):
    lr: float
    files: dict[int, str]
    batch: Batch


def guarded(gang: Gang, work: Callable[[], Any]) -> Any:
    """Returns the result of `work`. If a collective in it fails, ends the process, after a moment for the thread that
    knows which rank is lost."""
    try:
        return work()
    except RuntimeError as error:
        if isinstance(error, OffbeatError) or not _is_of_collective(error):
            raise
        log.error("trainer rank %d: %s", gang.rank, " ".join(str(error).split())[:300])
        gang.name_lost()


def _is_of_collective(error: RuntimeError) -> bool:
    text = str(error).lower()
    return "gloo" in text or "nccl" in text or "connection" in text


def _versions_of(batch: Batch) -> set[int]:
    arrays = [member.trajectory.versions for group in batch.groups for member in group.members]
    return {int(number) for array in arrays for number in np.unique(array)}


def _from_wire(kind: type, value: Any) -> Any:
    return array_from_wire(**value)
