"""The trainer's gang: its ranks, how they find each other, what they tell each other, and how a lost one is noticed.

Rank 0 gives orders and takes part in them; the others wait for orders and carry them out (`offbeat.trainer.gang`).
Orders are numbered, and a rank that misses one ends. Waiting for an order has no deadline, because rank 0 may wait an
hour for a batch. Instead a thread of rank 0 exchanges a beat with every other rank, all the time. A rank that died is
noticed at once, because its connection closes; one that hangs is noticed after `lost_after_s`. Whoever notices says
which rank it was, and ends the process, since other threads may wait for the lost rank within a collective.

Groups keep these apart: gloo for beats, for orders, for small results, and for the weights of a version, which are
exchanged while the next step is trained; and the device's own for a pass.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError, UserError
from offbeat.host_memory import return_freed_blocks
from offbeat.trainer.rounds import Arrays, Ranks
from offbeat.trajectory import array_from_wire, array_to_wire

LOST = 75
"""Exit status of a rank that ends because another one was lost."""
FOREVER = timedelta(days=365)
LAST_BEAT = -1
"""The beat with which rank 0 ends the gang."""
BEATS_PER_LIMIT = 4
"""Number of beats within `lost_after_s`."""
FOLLOWER_PATIENCE = 2.0
"""A follower gives rank 0 this multiple of `lost_after_s`, so that rank 0 finds and names a lost rank first."""
RETURNED_BYTES = 4 << 20
"""Size from which on freed memory of ranks on a CPU goes back to the system: smaller than a layer that ranks gather,
larger than most of what a pass computes, since mapping memory anew takes time."""
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Joins equally long tensors of all ranks; torch renamed it in 2.13."""


class RankLost(OffbeatError):
    """A rank of the gang died, hangs or never came; the message names it."""


@dataclass(frozen=True)
class RankPlace:
    """One rank's place in its gang, as torchrun's environment variables tell it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    restart: str = "0"
    """Identifies this start of the gang where several use one store, as under torchrun."""
    has_agent_store: bool = False
    """Whether the store at `address` belongs to torchrun, not to rank 0."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace | None:
        """Returns the place that the environment describes; None for a trainer of one rank."""
        if int(environment.get("WORLD_SIZE") or 1) <= 1:
            return None
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise UserError(
                f"WORLD_SIZE = {environment['WORLD_SIZE']}: {', '.join(missing)} must be set, too; start trainers of "
                "several ranks with torchrun, or with offbeat train and trainer.ranks"
            )
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        if not 0 <= rank < size:
            raise UserError(f"RANK = {rank}: must be 0 to {size - 1}, because WORLD_SIZE = {size}")
        return cls(
            rank,
            size,
            int(environment.get("LOCAL_RANK") or 0),
            int(environment.get("LOCAL_WORLD_SIZE") or 1),
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


class Gang(Ranks):
    """The ranks of a trainer with several. Made by `join_gang`."""

    def __init__(self, place: RankPlace, device: torch.device, timeout_s: float, lost_after_s: float, via_host: bool):
        self.place, self.rank, self.size = place, place.rank, place.size
        self.device, self.timeout_s, self.lost_after_s, self.via_host = device, timeout_s, lost_after_s, via_host
        self.hosts: list[str] = []
        """Host of each rank, for messages."""
        self.doing = "starting"
        """This rank's present task, which the message names when the rank is lost."""
        self._num_orders = 0
        self._ending = threading.Event()
        limit = timedelta(seconds=timeout_s)
        self.data = dist.group.WORLD
        self._orders = dist.new_group(backend="gloo", timeout=FOREVER)
        self._small = dist.new_group(backend="gloo", timeout=limit)
        self._beats = dist.new_group(backend="gloo", timeout=FOREVER)
        self._weights = dist.new_group(backend="gloo", timeout=limit)

    def merge(self, items: Sequence[tuple[int, Arrays]]) -> list[tuple[int, Arrays]]:
        return super().merge([item for data in self.gather(_encode(items)) for item in _decode(data)])

    def gather(self, data: bytes) -> list[bytes]:
        sizes = torch.zeros(self.size, dtype=torch.int64)
        all_gather(sizes, torch.tensor([len(data)]), group=self._small)
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        found = torch.empty(self.size * longest, dtype=torch.uint8)
        all_gather(found, own, group=self._small)
        rows = found.view(self.size, longest).numpy()
        return [rows[rank, : int(size)].tobytes() for rank, size in enumerate(sizes)]

    def to_rank_0(self, tensor: Tensor) -> list[Tensor] | None:
        """Returns the tensors of all ranks, of equal shape and in host memory, on rank 0; None on the others."""
        here = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
        found = [torch.empty_like(here) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(here, found, dst=0, group=self._small)
        return None if found is None else [one.view(tensor.dtype).view(tensor.shape) for one in found]

    def exchange_weights(self, received: Tensor, sent: Tensor, sizes: list[int], outgoing: list[int]) -> None:
        """Sends `outgoing` bytes of `sent` to each rank and receives `sizes` bytes from each, in host memory. It may go
        on while other threads train."""
        dist.all_to_all_single(received, sent, sizes, outgoing, group=self._weights)

    def check_folder(self, folder: Path) -> None:
        """Raises a `UserError` on all ranks if one of them does not share `folder` with rank 0."""
        proof = folder / f".seen-by-all-ranks-{self.place.port}-{self.place.restart}"
        if self.rank == 0:
            proof.touch()
        self.gather(b"")
        problems = self.agree("" if proof.is_file() else self.hosts[self.rank])
        if self.rank == 0:
            proof.unlink(missing_ok=True)
        if problems:
            raise UserError(_not_shared(folder, problems))

    def order(self, kind: str, body: bytes = b"") -> None:
        """Gives an order to all other ranks; only rank 0 calls it. It then has to take part itself."""
        self._num_orders += 1
        self.doing = f"order {self._num_orders} ({kind})"
        head = torch.tensor([self._num_orders, len(kind.encode()), len(body)])
        dist.broadcast(head, 0, group=self._orders)
        dist.broadcast(torch.frombuffer(bytearray(kind.encode() + body), dtype=torch.uint8), 0, group=self._orders)

    def next_order(self) -> tuple[str, bytes]:
        """Waits for the next order and returns its kind and body; every rank but rank 0 calls it."""
        self.doing = f"waiting for order {self._num_orders + 1}"
        head = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(head, 0, group=self._orders)
        number, kind_bytes, body_bytes = head.tolist()
        if number != self._num_orders + 1:
            raise RankLost(f"rank {self.rank}: got order {number}, but order {self._num_orders + 1} was next")
        data = torch.empty(kind_bytes + body_bytes, dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._orders)
        found = data.numpy().tobytes()
        self._num_orders, kind = number, found[:kind_bytes].decode()
        self.doing = f"order {number} ({kind})"
        return kind, found[kind_bytes:]

    def start_beats(self) -> None:
        self.hosts = [name.decode() for name in self.gather(f"{socket.gethostname()}, pid {os.getpid()}".encode())]
        work = self._beat_all if self.rank == 0 else self._answer_beats
        self._beating = threading.Thread(target=work, name="rank-beats", daemon=True)
        self._beating.start()

    def end(self) -> None:
        """Ends the gang in good order; every rank must call it."""
        self._ending.set()
        self._beating.join(self.lost_after_s)
        self.gather(b"")
        dist.destroy_process_group()

    def name_lost(self) -> NoReturn:
        """Ends this process after a collective failed. Waits a little first, so that the thread with the beats, which
        knows which rank was lost, can say so and end the process itself."""
        time.sleep(self.lost_after_s + 1.0)
        self._die(f"a collective failed during {self.doing}, but all ranks answer; see the other ranks' logs")

    def _beat_all(self) -> None:
        beat = torch.zeros(1, dtype=torch.int64)
        while not self._ending.wait(self.lost_after_s / BEATS_PER_LIMIT):
            beat += 1
            for rank in range(1, self.size):
                self._exchange(rank, beat, timedelta(seconds=self.lost_after_s))
        for rank in range(1, self.size):
            self._exchange(rank, torch.tensor([LAST_BEAT]), timedelta(seconds=self.lost_after_s))

    def _exchange(self, rank: int, beat: Tensor, limit: timedelta) -> None:
        try:
            self._send(beat, rank, limit)
            self._receive(torch.zeros(1, dtype=torch.int64), rank, limit)
        except RuntimeError as error:
            if not self._ending.is_set():
                self._lose(rank, error)

    def _answer_beats(self) -> None:
        beat, limit = torch.zeros(1, dtype=torch.int64), timedelta(seconds=FOLLOWER_PATIENCE * self.lost_after_s)
        while int(beat) != LAST_BEAT:
            try:
                self._receive(beat, 0, limit)
                self._send(beat, 0, limit)
            except RuntimeError as error:
                self._lose(0, error)

    def _send(self, beat: Tensor, rank: int, limit: timedelta) -> None:
        if (work := dist.isend(beat, rank, group=self._beats)) is not None:
            work.wait(limit)

    def _receive(self, beat: Tensor, rank: int, limit: timedelta) -> None:
        if (work := dist.irecv(beat, rank, group=self._beats)) is not None:
            work.wait(limit)

    def _lose(self, rank: int, error: RuntimeError) -> NoReturn:
        is_late = "imed out" in str(error) or "imeout" in str(error)
        limit_s = self.lost_after_s * (1.0 if self.rank == 0 else FOLLOWER_PATIENCE)
        how = f"has not answered for {limit_s:g} s" if is_late else "has ended"
        self._die(f"rank {rank} ({self.hosts[rank]}) {how} during {self.doing}")

    def _die(self, why: str) -> NoReturn:
        print(f"offbeat: trainer rank {self.rank}: {why}; all ranks end", file=sys.stderr, flush=True)
        os._exit(LOST)


def join_gang(
    place: RankPlace, store: dist.Store, device: torch.device, *, timeout_s: float, lost_after_s: float
) -> Gang:
    """Connects the ranks that met at `store`, and returns the gang. A collective fails after `timeout_s` seconds; a
    rank that does not answer counts as lost after `lost_after_s`."""
    num_here = torch.cuda.device_count() if device.type == "cuda" else 0
    via_host = device.type == "cuda" and place.local_size > num_here  # NCCL refuses two ranks on one GPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # otherwise a DeviceMesh would choose a GPU by LOCAL_RANK
    else:
        return_freed_blocks(RETURNED_BYTES)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" and not via_host else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout_s),
    )
    gang = Gang(place, device, timeout_s, lost_after_s, via_host)
    gang.start_beats()
    return gang


TOLD, READ = "told", "read"
SEEN_WITHIN_S = 20.0
"""Longest wait for a file of rank 0, which a network file system may show late."""


def tell(store: dist.Store, size: int, content: bytes, folder: Path, within_s: float) -> None:
    """Tells all other ranks what the run is, before they can be connected; only rank 0 calls it. `content`, which may
    hold passwords, goes through a file in `folder`, which all ranks share; the store, which anybody who can connect may
    read, only holds its name. Raises a `UserError` if a rank cannot see the folder."""
    note = folder / f".told-{secrets.token_hex(8)}"
    with open(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    try:
        store.set(TOLD, str(note))
        problems = [_answer_of(store, f"{READ}/{rank}", within_s) for rank in range(1, size)]
    finally:
        note.unlink(missing_ok=True)
    if problems := [f"rank {rank}: {problem}" for rank, problem in enumerate(problems, 1) if problem]:
        raise UserError(_not_shared(folder, problems))


def told(store: dist.Store, rank: int, within_s: float) -> bytes:
    """Waits for what rank 0 tells, and returns it."""
    try:
        store.wait([TOLD], timedelta(seconds=within_s))
    except RuntimeError as error:
        raise RankLost(f"rank 0 came, but did not say within {within_s:g} s what to train; look at its log") from error
    note, until_s = Path(store.get(TOLD).decode()), time.monotonic() + SEEN_WITHIN_S
    while not note.is_file() and time.monotonic() < until_s:
        time.sleep(0.05)
    try:
        content = note.read_bytes()
    except OSError as error:
        store.set(f"{READ}/{rank}", socket.gethostname())
        raise UserError(_not_shared(note.parent, [f"rank {rank}: {socket.gethostname()}"])) from error
    store.set(f"{READ}/{rank}", "")
    return content


def _answer_of(store: dist.Store, key: str, within_s: float) -> str:
    """Waits for a value in the store."""
    try:
        store.wait([key], timedelta(seconds=within_s))
    except RuntimeError as error:
        rank = key.rpartition("/")[2]
        raise RankLost(f"rank {rank} came, but has not read what to train within {within_s:g} s") from error
    return store.get(key).decode()


def _not_shared(folder: Path, problems: Sequence[str]) -> str:
    return (
        f"{folder}: {'; '.join(problems)} cannot see this folder of rank 0; give all ranks a --dir on a disk that they "
        "share"
    )


def meet(place: RankPlace, within_s: float) -> dist.Store:
    """Waits until all ranks are there, and returns the store at which they met. Raises `RankLost` that names the ranks
    that did not come within `within_s` seconds."""
    deadline_s, where = time.monotonic() + within_s, f"{place.address}:{place.port}"
    try:
        store: dist.Store = dist.TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0 and not place.has_agent_store,
            timeout=timedelta(seconds=within_s),
            wait_for_workers=False,
        )
    except (RuntimeError, TimeoutError) as error:
        if place.rank == 0 and not place.has_agent_store:
            raise UserError(f"MASTER_PORT = {place.port}: rank 0 cannot listen at {where}: {_short(error)}") from error
        raise RankLost(f"rank {place.rank}: rank 0 did not come to {where} within {within_s:g} s") from error
    store = dist.PrefixStore(f"offbeat/{place.restart}", store)
    store.set(f"here/{place.rank}", socket.gethostname())
    missing = []
    for rank in range(place.size):
        left_s = max(deadline_s - time.monotonic(), 0.01)
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=left_s))
        except (RuntimeError, TimeoutError):
            missing.append(rank)
    if missing:
        which = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {place.size}"
        raise RankLost(
            f"{which} did not come to {where} within {within_s:g} s; look at their logs, and whether their machines "
            "can connect to this address"
        )
    return store


def _encode(items: Sequence[tuple[int, Arrays]]) -> bytes:
    return msgspec.msgpack.encode(items, enc_hook=array_to_wire)


def _decode(data: bytes) -> list[tuple[int, Arrays]]:
    kind = list[tuple[int, Arrays]]
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda _, value: array_from_wire(**value))


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
