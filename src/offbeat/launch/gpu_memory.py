"""Divides a GPU's memory between the trainer and an engine's server on the same card. Imports no torch."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.config import Config
from offbeat.config.schema import ALONE_SHARE, SERVED
from offbeat.config.summary import BYTES_PER_PARAMETER
from offbeat.launch.model_size import num_parameters

FLOAT_BYTES = 4
"""Bytes of a float32 number. Each parameter has four: its master weight, its gradient and AdamW's two moments."""
USABLE_SHARE = 0.92
"""Share of a GPU's memory that trainer and servers divide; the rest is for CUDA itself and for fragmentation."""
LEAST_BYTES = 2_500_000_000
"""Least memory that a server needs besides its weights: buffers, CUDA graphs, and some keys and values."""

OUTSIDE_BYTES = 3_000_000_000
"""Memory that trainer and server take besides tensors: CUDA's own for each process, CUDA graphs, and buffers while a
server loads new weights. With 2 GB for it, a card of 80 GB was exceeded by 0.4 GB."""
LOCK = "gpu.lock"
"""File in a run's folder. On a GPU that trainer and servers share, a process locks it while it takes its memory at the
start (`taking_turns`)."""


@contextmanager
def taking_turns(lock: Path | None) -> Iterator[None]:
    """Waits for the lock on the file `lock` and holds the lock within the block; does nothing if `lock` is None.

    When vLLM starts, it runs the model once and compares the GPU's free memory before and after, to find how much of
    its share is left for keys and values. If the trainer took or freed memory of the same GPU in between, vLLM would
    find a wrong number.
    """
    if lock is None:
        yield
        return
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def server_share(config: Config, total_bytes: int) -> float:
    """Returns the share of the trainer's GPU that each server on it may take; `total_bytes` is the GPU's memory.

    With `engine.memory_share = "auto"`, the memory that the trainer's weights, gradients and optimizer leave is halved.
    One half is for the trainer's micro-batches, the other for all servers together. A server gets at least its weights
    and `LEAST_BYTES`.
    """
    if config.engine.memory_share != "auto":
        return config.engine.memory_share
    size = num_parameters(config.model.path)
    if size is None:
        return ALONE_SHARE / 2
    state = sum(training_bytes(config, size, on_gpu=True).values())
    half = (USABLE_SHARE * total_bytes - state) / 2
    least = BYTES_PER_PARAMETER["bfloat16"] * size / config.engine.tensor_parallel + LEAST_BYTES
    share = max(half / (config.rollout.workers or 1), least) / total_bytes
    return min(round(share, 3), ALONE_SHARE)


def num_servers(config: Config) -> int:
    """Returns how many servers the run's own workers start. Returns 0 with `engine.url`, because the memory of a server
    that somebody else started is in use before the trainer starts."""
    return 0 if config.rollout.engine not in SERVED or config.engine.url else config.rollout.workers or 0


def servers_bytes(config: Config, total_bytes: int) -> int:
    """Returns how many bytes of the trainer's GPU are for the servers that the run's own workers start."""
    number = num_servers(config)
    return int(number * server_share(config, total_bytes) * total_bytes) if number else 0


def trainer_bytes(config: Config, total_bytes: int) -> int:
    """Returns how many bytes of its GPU the trainer may take: all, unless servers of the run's own workers share the
    GPU. The servers' part stays reserved while a server restarts, because otherwise the trainer's memory cache would
    fill it."""
    taken = servers_bytes(config, total_bytes)
    return max(total_bytes - taken - OUTSIDE_BYTES, 0) if taken else total_bytes


def training_bytes(config: Config, num_parameters: int, *, on_gpu: bool) -> dict[str, int]:
    """Returns the least memory that trainer and embedded engine need on one device, besides activations and KV cache,
    as bytes by purpose. `on_gpu`: whether model.dtype = "auto" stands for bfloat16."""
    dtype = "bfloat16" if config.model.dtype == "auto" and on_gpu else config.model.dtype
    weights, has_engine = BYTES_PER_PARAMETER[dtype] * num_parameters, config.rollout.engine in ("auto", "embedded")
    engine = {"engine": weights} if has_engine else {}
    if config.model.lora_rank:  # the frozen weights also serve as the reference; adapters are too small to count
        return {"weights": weights, **engine}
    state = {"weights": FLOAT_BYTES * num_parameters + weights * (dtype == "bfloat16")}
    state |= {"optimizer": 2 * FLOAT_BYTES * num_parameters, "gradients": FLOAT_BYTES * num_parameters}
    return state | engine | ({"reference": weights} if config.loss.kl_coef > 0 else {})
