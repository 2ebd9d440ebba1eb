"""AdamW whose moments stay in host memory, which saves 8 bytes of GPU memory per parameter.

An update copies the moments to the GPU a chunk at a time, computes there, and copies them back. The two copies and the
computation run in three CUDA streams, so that they overlap. The arithmetic is torch's own, so the result has the same
bits as an update with all moments on the GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**25
"""Length of a chunk: how many numbers of each of the two moments it holds. These 134 MB per moment are enough to hide
the latency of a transfer; three chunks of both moments take 0.8 GB on the GPU."""
NUM_BUFFERS = 3
"""Number of chunks on the GPU: one being copied in, one in use, one being copied out."""


class HostAdamW(torch.optim.AdamW):
    """AdamW with moments in pinned host memory, for parameters on one GPU."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        device = group["params"][0].device
        inward, outward, here = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.current_stream(device)
        numbers = min(CHUNK_NUMBERS, max(parameter.numel() for parameter in group["params"]))
        buffers = [torch.empty(2, numbers, device=device) for _ in range(NUM_BUFFERS)]
        is_free: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        inward.wait_stream(here)
        for i, (weights, gradient, moments, step) in enumerate(self._chunks(group)):
            held = buffers[i % NUM_BUFFERS][:, : weights.numel()]
            if (free := is_free[i % NUM_BUFFERS]) is not None:
                inward.wait_event(free)
            with torch.cuda.stream(inward):
                for on_gpu, on_host in zip(held, moments, strict=True):
                    on_gpu.copy_(on_host, non_blocking=True)
            here.wait_stream(inward)
            torch._fused_adamw_(
                [weights],
                [gradient],
                [held[0]],
                [held[1]],
                [],
                [step],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            outward.wait_stream(here)
            with torch.cuda.stream(outward):
                for on_gpu, on_host in zip(held, moments, strict=True):
                    on_host.copy_(on_gpu, non_blocking=True)
                is_free[i % NUM_BUFFERS] = outward.record_event()
        outward.synchronize()  # whoever reads the moments next reads them on the host

    def _chunks(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Adds 1 to each parameter's update count ("step"); yields its weights, gradient, moments and count in
        chunks."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter] or self.new_state(parameter)
            state["step"] += 1
            flat = [parameter.view(-1), parameter.grad.reshape(-1)]
            moments = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
            for start in range(0, parameter.numel(), CHUNK_NUMBERS):
                part = slice(start, start + CHUNK_NUMBERS)
                yield flat[0][part], flat[1][part], (moments[0][part], moments[1][part]), state["step"]

    def new_state(self, parameter: Tensor) -> dict[str, Any]:
        """Creates and returns the optimizer state of `parameter`, with moments of 0 in host memory."""
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = pinned_zeros(parameter), pinned_zeros(parameter)
        return state


def pinned_zeros(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros of the shape of `like` in pinned host memory, which a GPU can read at full speed. torch's own
    function is not used: it rounds each size up to a power of two, and so takes up to twice the memory."""
    zeros = torch.zeros(like.shape, dtype=dtype)
    if (error := torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)).value:
        raise MemoryError(
            f"{zeros.nbytes / 1e9:.1f} GB of host memory cannot be pinned: {error}; free host memory, or raise the "
            "limit on locked memory (ulimit -l)"
        )
    # The address may be used again, and CUDA refuses copies from memory that is half registered.
    weakref.finalize(zeros, _unpin, zeros.data_ptr()).atexit = False
    return zeros


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
