"""Size of a micro-batch: as configured, or measured on the GPU, and halved if the GPU runs out of memory.

The size changes only the order in which a step's sums are added up, and thereby their rounding. With `run.exact`, which
promises equal bits, the size is never measured and never halved.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.model.devices import empty_cache, memory_bytes
from offbeat.trainer.host_adamw import HostAdamW
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import Policy

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_TOKENS = 32768
"""A measured size is at most this many tokens, because with more, matrix products are no faster."""
MIN_TOKENS = 512
"""Size, in tokens, that is not halved again: a GPU that cannot hold such a micro-batch cannot train the model."""
PROBES = (2048, 4096)
"""Numbers of tokens in the two passes whose memory is measured. With fewer tokens, the peak may be the gradient of one
large weight, late in the backward pass. With more, it is the activations, which grow linearly with this number."""
SAFE_SHARE = 0.9
"""Share of the free memory to plan with; the rest is for fragmentation and for larger needs than were measured."""
LATER_BYTES, LATER_BYTES_WITHOUT_MOMENTS = 12, 4
"""Bytes per trained parameter that are not yet allocated when the size is measured: a gradient and two moments; if the
moments are in host memory, only a gradient."""


@dataclass
class MicrobatchSize:
    """Largest number of tokens in a micro-batch (`tokens`). With `shrinks`, it is halved when the GPU runs out of
    memory, and `on_change` is called with the new number."""

    tokens: int
    shrinks: bool = False
    on_change: Callable[[int], None] = lambda tokens: None

    def fitting(self, work: Callable[[], T], undo: Callable[[], bool | None]) -> T:
        """Returns the result of `work`. If the GPU's memory runs out, calls `undo` and tries again: with the same size
        if `undo` returns True, having made room, else with half of it. Raises a `UserError` if the size may not shrink
        further."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                needed = str(error).split(". ")[0]
            made_room = undo()
            gc.collect()  # an error's traceback holds the activations
            empty_cache(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            if made_room:
                log.info("out of GPU memory: moments that had moved to the GPU are in host memory again")
                continue
            if not self.shrinks or self.tokens <= MIN_TOKENS:
                raise UserError(
                    f"batch.tokens_per_microbatch = {self.tokens}: the GPU's memory is too small ({needed}); set a "
                    "smaller number, model.gradient_checkpointing = true, or model.lora_rank"
                )
            self.tokens //= 2
            log.warning(
                "out of GPU memory: micro-batches have %d tokens from now on; this changes results only by rounding",
                self.tokens,
            )
            self.on_change(self.tokens)


def measured(policy: Policy, num_taken_bytes: int, longest: int) -> int:
    """Returns the largest size, in tokens, for which the policy's GPU has memory. `num_taken_bytes` is the memory that
    other processes take or will take there; `longest` is the most tokens that prompt and answer may have together."""
    (small, large), most = PROBES, MAX_TOKENS
    while True:
        try:
            _pass_over(policy, small, longest)  # allocates the gradients, which are counted apart (`LATER_BYTES`)
            needed = [_peak_bytes(policy, tokens, longest) for tokens in (small, large)]
            break
        except torch.OutOfMemoryError:
            pass  # with less, outside of this block, because the error holds the activations
        _clear(policy)
        if small <= MIN_TOKENS:
            return MIN_TOKENS
        small, large = small // 2, large // 2
        most = large  # twice as many did not fit
    _clear(policy)
    per_token = max((needed[1] - needed[0]) / (large - small), 1.0)
    constant = max(needed[0] - per_token * small, 0.0)
    found = memory_bytes(policy.device)
    assert found is not None, "this is a bug: the size of micro-batches is measured only on GPUs"
    free, total = found
    per_parameter = LATER_BYTES_WITHOUT_MOMENTS if isinstance(policy.optimizer, HostAdamW) else LATER_BYTES
    num_later = per_parameter * sum(master.numel() for master in policy.masters)
    room = SAFE_SHARE * (min(free, total - num_taken_bytes - torch.cuda.memory_allocated(policy.device)) - num_later)
    tokens = int((room - constant) / per_token) // 1024 * 1024
    return min(max(tokens, MIN_TOKENS), most)


def _clear(policy: Policy) -> None:
    """Frees the gradients and torch's cache."""
    policy.drop_gradients()
    gc.collect()
    empty_cache(policy.device)


def _peak_bytes(policy: Policy, num_tokens: int, longest: int) -> int:
    """Returns the memory that a forward and backward pass over `num_tokens` tokens takes at its peak, in addition to
    what was allocated before."""
    empty_cache(policy.device)
    torch.cuda.reset_peak_memory_stats(policy.device)
    before = torch.cuda.memory_allocated(policy.device)
    _pass_over(policy, num_tokens, longest)
    return torch.cuda.max_memory_allocated(policy.device) - before


def _pass_over(policy: Policy, num_tokens: int, longest: int) -> None:
    """Runs a forward and backward pass over `num_tokens` random tokens, in samples of at most `longest` tokens."""
    rng = np.random.default_rng(0)
    vocabulary = policy.model.config.get_text_config().vocab_size
    samples: list[Sample] = []
    while num_tokens > 0:
        length = min(num_tokens, longest)
        tokens, num_tokens = rng.integers(0, vocabulary, length + 1), num_tokens - length
        zeros = np.zeros(length, np.float32)
        samples.append(Sample(len(samples), tokens[:1], tokens[1:], zeros, np.ones(length, bool), 0.0))
    batch = pack(samples, range(len(samples)), policy.device)
    policy.forward_backward(batch, lambda found: found.logprobs.sum())
    torch.cuda.current_stream(policy.device).synchronize()


class SizeFile:
    """File in the trainer's folder with the measured or halved size, so that a resumed run continues with this size."""

    def __init__(self, path: Path, device_name: str):
        self.path, self.device_name = path, device_name

    def read(self) -> int | None:
        """Returns the stored size; None if no size is stored or the stored one is for another kind of GPU."""
        try:
            stored = json.loads(self.path.read_text())
            return int(stored["tokens"]) if stored["device"] == self.device_name else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, tokens: int) -> None:
        write_atomic(self.path, json.dumps({"tokens": tokens, "device": self.device_name}).encode())
