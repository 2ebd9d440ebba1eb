"""Divides a GPU's memory between the trainer and an engine's server on the same card. Imports no torch."""

from __future__ import annotations

from offbeat.config import Config
from offbeat.config.schema import ALONE_SHARE, SERVED
from offbeat.config.summary import BYTES_PER_PARAMETER
from offbeat.launch.model_size import num_parameters

FLOAT_BYTES = 4
"""Bytes per parameter of master weights, of each of the two moments, and of gradients, all in float32."""
USABLE_SHARE = 0.92
"""Share of a card that trainer and server divide; the rest is for CUDA itself and for fragments."""
LEAST_BYTES = 2_500_000_000
"""What a server needs besides its weights: buffers, graphs, and some keys and values."""


def server_share(config: Config, total_bytes: int) -> float:
    """Returns the share of the trainer's GPU that a server on it may take, given the GPU's memory.

    What the trainer's weights and optimizer leave is halved: one half is for micro-batches, the other
    for the servers. A smaller half makes either slower, and neither fail.
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


def servers_bytes(config: Config, total_bytes: int) -> int:
    """Returns the memory of the trainer's card that the servers of the run's own workers take. A server that somebody
    else started has taken its memory already."""
    num_servers = config.rollout.workers or 0
    if config.rollout.engine not in SERVED or not num_servers or config.engine.url:
        return 0
    return int(num_servers * server_share(config, total_bytes) * total_bytes)


def training_bytes(config: Config, num_parameters: int, *, on_gpu: bool) -> dict[str, int]:
    """Returns the least memory that trainer and embedded engine need on one device, besides activations and KV, as
    bytes by purpose."""
    dtype = "bfloat16" if config.model.dtype == "auto" and on_gpu else config.model.dtype
    weights, has_engine = BYTES_PER_PARAMETER[dtype] * num_parameters, config.rollout.engine == "embedded"
    engine = {"engine": weights} if has_engine else {}
    if config.model.lora_rank:  # the frozen weights also serve as the reference; adapters are too small to count
        return {"weights": weights, **engine}
    state = {"weights": FLOAT_BYTES * num_parameters + weights * (dtype == "bfloat16")}
    state |= {"optimizer": 2 * FLOAT_BYTES * num_parameters, "gradients": FLOAT_BYTES * num_parameters}
    return state | engine | ({"reference": weights} if config.loss.kl_coef > 0 else {})
