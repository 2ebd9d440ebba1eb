"""`offbeat doctor --ranks N`: tries what several trainer ranks need. The ranks are N processes on this machine or,
under torchrun, those that it has started.

They meet, all-gather and reduce-scatter some data, see each other's file in the shared folder, and train one tiny step,
which must have the bits of one rank. What is measured is printed by rank 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.model.devices import be_deterministic, rank_device
from offbeat.model.loading import TINY, load_model
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.ranks import Gang, RankPlace, all_gather, join_gang, meet
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step

NUM_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Bytes of gathered data that are timed, by kind of device."""
REPEATS = 5
ANSWER_TOKENS = (5, 9, 3, 12, 7, 2)


def examine_here(num_ranks: int, arguments: list[str], within_s: float) -> int:
    """Starts `num_ranks` ranks of `offbeat doctor` on this machine, with these further `arguments`, and waits for them;
    returns 0 if all is well, else 1."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = []
        for rank in range(num_ranks):
            place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
            words = ["doctor", f"--ranks={num_ranks}", f"--shared={folder}", *arguments]
            ranks.append(subprocess.Popen([sys.executable, "-m", "offbeat", *words], env=environment))
        try:
            until_s = time.monotonic() + within_s
            statuses = [started.wait(max(until_s - time.monotonic(), 0.1)) for started in ranks]
        except subprocess.TimeoutExpired:
            raise OffbeatError(f"the ranks have not finished within {within_s:g} s; raise --within") from None
        finally:
            for started in ranks:
                started.kill()
                started.wait()
    return int(any(statuses))


def examine(place: RankPlace, config: Config, shared: Path | None, within_s: float) -> int:
    """Takes part as one rank; returns 0 if all is well, else 1. Rank 0 prints what was found."""
    device = rank_device(config.model.device, place.local_rank)
    be_deterministic(device)
    gang = join_gang(place, meet(place, within_s), device, timeout_s=within_s, lost_after_s=config.trainer.lost_after_s)
    if gang.rank == 0:
        kind = "through host memory (fewer GPUs than ranks)" if gang.via_host else dist.get_backend_config(gang.data)
        print(f"  ranks            {gang.size}: {'; '.join(gang.hosts)}")
        print(f"  device, backend  {device.type}, {kind}")
    problems = []
    for name, work in (("all-gather", _gather_once), ("reduce-scatter", _scatter_once)):
        speed = _speed(gang, work)
        _tell(gang, name, f"{speed:.2f} GB/s per rank")
    if shared is None:
        _tell(gang, "shared folder", "not tried; give the trainer's --dir as --shared FOLDER")
    else:
        try:
            gang.check_folder(shared)
            _tell(gang, "shared folder", f"{shared} is seen by all ranks")
        except UserError as error:
            problems.append(str(error))
            _tell(gang, "shared folder", str(error), is_bad=True)
    ranked, alone = _train(gang, device), _train(None, device)
    is_equal = not ranked or all(torch.equal(ranked[name], alone[name].cpu()) for name in alone)
    told = gang.agree("" if is_equal else "one step of all ranks differs in bits from one step of one rank")
    _tell(gang, "one step", told[0] if told else "equal to the bit to that of one rank", is_bad=bool(told))
    gang.end()
    return int(bool(problems or told))


def _tell(gang: Gang, about: str, text: str, *, is_bad: bool = False) -> None:
    if gang.rank == 0:
        print(f"{'x' if is_bad else ' '} {about:<16} {text}", flush=True)


def _speed(gang: Gang, work: Callable[[Gang, Tensor, Tensor], None]) -> float:
    """Returns the GB/s at which each rank receives the other ranks' share of the data, in the fastest of some calls."""
    device = torch.device("cpu") if gang.via_host else gang.device
    each = NUM_BYTES[device.type] // 4 // gang.size
    small, large = torch.ones(each, device=device), torch.ones(each * gang.size, device=device)
    seconds = []
    for _ in range(REPEATS):
        gang.gather(b"")
        began_s = time.perf_counter()
        work(gang, small, large)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return small.nbytes * (gang.size - 1) / min(seconds) / 1e9


def _gather_once(gang: Gang, small: Tensor, large: Tensor) -> None:
    all_gather(large, small, group=gang.data)


def _scatter_once(gang: Gang, small: Tensor, large: Tensor) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(small, large, group=gang.data)


def _train(gang: Gang | None, device: torch.device) -> dict[str, Tensor]:
    """Trains one step on a tiny model, on all ranks or on this one alone. Returns its weights; on all ranks of a gang
    but the first, an empty dict."""
    model = load_model(TINY, torch.float32, device if gang is None else torch.device("cpu"))
    if gang is None:
        policy: Policy = Policy(model, AdamSettings(), exact=True)
    else:
        policy = ShardedPolicy(model, AdamSettings(), exact=True, gang=gang)
    rng = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(ANSWER_TOKENS):
        tokens = rng.integers(0, model.config.vocab_size, length + 4)
        logprobs, mask = -rng.random(length).astype(np.float32), np.ones(length, bool)
        samples.append(Sample(i // 2, tokens[:4], tokens[4:], logprobs, mask, float(i % 2)))
    train_step(policy, samples, StepSettings(tokens_per_microbatch=16), 1e-3)
    return {name: tensor.clone() for name, tensor in policy.published.items()}
