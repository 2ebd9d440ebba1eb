"""The output layer alone: log-probs of many tokens over a large vocabulary, forward and back, in chunks and at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from offbeat.trainer import output_head
from offbeat.trainer.output_head import OutputHead

NUM_TARGETS, NUM_WORDS, WIDTH = 16_384, 151_936, 1536
ROUNDS = 5
GB = 1e9


@dataclass(frozen=True)
class HeadCost:
    """`added_gb` is the memory above that of weights, their gradient and the output layer's input."""

    seconds: float
    added_gb: float


def measure_head(device: torch.device) -> tuple[dict[str, HeadCost], float]:
    """Returns the cost of each way, and the largest difference between log-probs in chunks and at once."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, NUM_WORDS, bias=False, device=device, dtype=torch.bfloat16)
    master = torch.zeros(NUM_WORDS, WIDTH, device=device)
    master.grad = torch.zeros_like(master)
    hidden = torch.randn(NUM_TARGETS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(NUM_WORDS, (NUM_TARGETS,), device=device)
    rows = torch.arange(NUM_TARGETS, device=device)
    head = OutputHead(layer, gradient_of=lambda weight: master, fuses=True)

    def ours() -> Tensor:
        return head.logprobs(hidden, rows, targets, 1.0)

    def with_autograd() -> Tensor:
        return torch.log_softmax(layer(hidden).float(), -1).gather(1, targets[:, None])[:, 0]

    found, in_chunks = {"chunks": _cost(ours, hidden)}, ours().detach()
    with patch.object(output_head, "CHUNK_BYTES", 2**50):
        found["one chunk"], at_once = _cost(ours, hidden), ours().detach()
    found["autograd"] = _cost(with_autograd, hidden)
    return found, float((in_chunks - at_once).abs().max())


def _cost(logprobs: Callable[[], Tensor], hidden: Tensor) -> HeadCost:
    def once() -> None:
        hidden.grad = None
        logprobs().sum().backward()

    once()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return HeadCost(statistics.median(seconds), (torch.cuda.max_memory_allocated() - before) / GB)
