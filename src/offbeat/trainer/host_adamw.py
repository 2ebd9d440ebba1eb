"""AdamW whose moments stay in host memory, which saves 8 bytes of GPU memory per parameter.

An update copies the moments to the GPU a chunk at a time, computes there, and copies them back. The two copies and the
computation run in three CUDA streams, so that they overlap. Moments for which the GPU turns out to have room move there
for good, because the bus is what an update waits for. The arithmetic is torch's own, so the result has the same bits as
an update with all moments on the GPU.
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
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the two moments in torch's AdamW."""
SETTLED_UPDATES = 2
"""Number of updates before moments may move to the GPU. By then passes, an update and a published version have shown
how much memory they take."""
SPARE_SHARE = 0.02
"""Share of the GPU's memory that moving moments leaves free, for fragmentation and for a larger micro-batch."""


class HostAdamW(torch.optim.AdamW):
    """AdamW with moments in pinned host memory, or on the GPU where it has room, for parameters on one GPU."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._num_updates = 0
        """Number of updates that this object has made."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        device = group["params"][0].device
        if self._num_updates >= SETTLED_UPDATES:
            self._move_to_gpu(_room_bytes(device))
        self._num_updates += 1
        inward, outward, here = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.current_stream(device)
        numbers = min(CHUNK_NUMBERS, max(parameter.numel() for parameter in group["params"]))
        buffers = [torch.empty(2, numbers, device=device) for _ in range(NUM_BUFFERS)]
        is_free: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        inward.wait_stream(here)
        num_copied = 0
        for weights, gradient, moments, step in self._chunks(group):
            if moments[0].is_cuda:
                _update(weights, gradient, moments, step, group)
                continue
            turn, num_copied = num_copied % NUM_BUFFERS, num_copied + 1
            held = buffers[turn][:, : weights.numel()]
            if (free := is_free[turn]) is not None:
                inward.wait_event(free)
            with torch.cuda.stream(inward):
                for on_gpu, on_host in zip(held, moments, strict=True):
                    on_gpu.copy_(on_host, non_blocking=True)
            here.wait_stream(inward)
            _update(weights, gradient, (held[0], held[1]), step, group)
            outward.wait_stream(here)
            with torch.cuda.stream(outward):
                for on_gpu, on_host in zip(held, moments, strict=True):
                    on_host.copy_(on_gpu, non_blocking=True)
                is_free[turn] = outward.record_event()
        outward.synchronize()  # whoever reads the moments next reads them on the host

    def _move_to_gpu(self, num_bytes: int) -> None:
        """Moves moments to the GPU, of one parameter after the other, as long as they take at most `num_bytes`."""
        for parameter, state in self.state.items():
            if state["exp_avg"].is_cuda or (needed := 2 * state["exp_avg"].nbytes) > num_bytes:
                continue
            num_bytes -= needed
            for name in MOMENTS:
                state[name] = state[name].to(parameter.device)

    def move_to_host(self) -> bool:
        """Moves all moments back to host memory; returns whether any had been on the GPU. Call this when the GPU's
        memory has run out: the peak that torch then remembers keeps them from moving to the GPU again."""
        moved = False
        for parameter, state in self.state.items():
            if state["exp_avg"].is_cuda:
                moved = True
                for name in MOMENTS:
                    state[name] = pinned_zeros(parameter).copy_(state[name])
        return moved

    def _chunks(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Adds 1 to each parameter's update count ("step"); yields its weights, gradient, moments and count in
        chunks."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter] or self.new_state(parameter)
            state["step"] += 1
            flat = [parameter.view(-1), parameter.grad.reshape(-1)]
            moments = state[MOMENTS[0]].view(-1), state[MOMENTS[1]].view(-1)
            for start in range(0, parameter.numel(), CHUNK_NUMBERS):
                part = slice(start, start + CHUNK_NUMBERS)
                yield flat[0][part], flat[1][part], (moments[0][part], moments[1][part]), state["step"]

    def new_state(self, parameter: Tensor) -> dict[str, Any]:
        """Creates and returns the optimizer state of `parameter`, with moments of 0 in host memory."""
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in MOMENTS:
            state[name] = pinned_zeros(parameter)
        return state


def _update(
    weights: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: Tensor, group: dict[str, Any]
) -> None:
    """Makes torch's AdamW update of `weights` and `moments`, all of which are on the GPU."""
    torch._fused_adamw_(
        [weights],
        [gradient],
        [moments[0]],
        [moments[1]],
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


def _room_bytes(device: torch.device) -> int:
    """Returns how much more GPU memory this process could have taken at its peak, less `SPARE_SHARE` of the whole."""
    free, total = torch.cuda.mem_get_info(device)
    available = min(
        torch.cuda.get_per_process_memory_fraction(device) * total, torch.cuda.memory_reserved(device) + free
    )
    return int(available - torch.cuda.max_memory_allocated(device) - SPARE_SHARE * total)


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
