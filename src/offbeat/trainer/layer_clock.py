"""Times a rank's own passes through the decoder layers, without its waits for other ranks.

FSDP2 gathers a layer's weights before the layer runs, and all ranks wait for the slowest there. So the whole time of a
step is the same on each rank, but not the time within layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offbeat.trainer.compiling import layers_of

SLOW_FACTOR = 2.0
"""A rank that takes this multiple of what the others take for a token is slow; like ranks differ by some 10 %."""
SLOW_STEPS = 3
"""Number of steps on end after which a slow rank is named: a single one may have met a busy moment."""
MIN_S = 0.05
"""Steps with less time than this within layers say nothing about speed."""


class LayerClock:
    """Seconds and tokens of the forward passes through a model's layers. Made after the model is divided, so that
    FSDP2's own hooks are outside."""

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._begun: list[Any] = []
        self._spans: list[tuple[Any, Any]] = []
        self._num_tokens = 0
        for layer in layers_of(model):
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)

    def _begin(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self._begun.append(self._now())

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._spans.append((self._begun.pop(), self._now()))
        self._num_tokens += args[0].shape[:-1].numel() if args else 0

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> tuple[float, int]:
        """Returns the seconds within layers and the tokens that went through one, since the last call."""
        spans, self._spans, self._begun = self._spans, [], []  # a pass that failed has not ended
        num_tokens, self._num_tokens = self._num_tokens, 0
        if self._is_cuda and spans:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in spans) / 1000, num_tokens
        return sum(end - begin for begin, end in spans), num_tokens


class SlowRanks:
    """Finds the ranks that are slower than the others for several steps on end; each is found once."""

    def __init__(self) -> None:
        self._num_steps: dict[int, int] = {}
        self._named: set[int] = set()

    def find(self, passes: Sequence[tuple[float, int]]) -> list[tuple[int, float]]:
        """Returns the slow ranks and how many times slower they are; `passes` are the seconds and tokens of each rank's
        step."""
        if len(passes) < 2 or any(seconds < MIN_S or not tokens for seconds, tokens in passes):
            return []
        each, found = [seconds / tokens for seconds, tokens in passes], []
        for rank, own in enumerate(each):
            times = own / statistics.median(each[:rank] + each[rank + 1 :])
            self._num_steps[rank] = self._num_steps.get(rank, 0) + 1 if times >= SLOW_FACTOR else 0
            if self._num_steps[rank] >= SLOW_STEPS and rank not in self._named:
                self._named.add(rank)
                found.append((rank, times))
        return found
