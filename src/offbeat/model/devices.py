"""Chooses the device and the dtype by name, and wraps torch's calls that differ between CUDA, Apple GPUs and CPUs.

All other code takes a `torch.device` and a `torch.dtype` from here. `cuda` covers NVIDIA and, in a ROCm build of torch,
AMD; `mps` is the GPU of an Apple machine. Asking for a device that this machine lacks raises a `UserError` that lists
the available devices.

On CPUs without bfloat16 instructions, torch multiplies bfloat16 about a hundred times slower than float32. On such CPUs
products are computed in float32 and rounded once (`spare`), as those instructions do. Weights and gradients stay
bfloat16.
"""

from __future__ import annotations

import os
import platform
import re
import threading
from functools import cache
from pathlib import Path
from types import MethodType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.errors import UserError

DEVICE = re.compile(r"(cpu|mps|cuda)(?::(\d+))?")
recording_lock = threading.Lock()
"""Held by an engine while it records a CUDA graph, and by the trainer during a pass: a pass may wait for the whole GPU,
as `torch.compile` does to compare kernels, which fails during a recording and spoils it."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of torch's memory on GPUs; torch refuses different values in the two."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def available_devices() -> list[str]:
    """Returns the names of this machine's devices, GPUs before the CPU, such as `cuda:0`, `cpu`."""
    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def pick_device(name: str = "auto") -> torch.device:
    """Returns the device of this name; `auto` is the first GPU, or the CPU if there is none."""
    found = available_devices()
    if name == "auto":
        return torch.device(found[0])
    match = DEVICE.fullmatch(name)
    if match is None:
        raise UserError(
            f"model.device = {name!r}: must be auto, cpu, cuda, cuda:N or mps; this machine has {', '.join(found)}"
        )
    kind, index = match.group(1), int(match.group(2) or 0)
    exact = f"cuda:{index}" if kind == "cuda" else kind
    if exact not in found or (kind != "cuda" and index > 0):
        raise UserError(
            f"model.device = {name!r}: this machine has only {', '.join(found)}; set it to one of them, or to auto"
        )
    return torch.device(exact)


def rank_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of one of several ranks on this machine: a GPU of its own while there are enough."""
    device = pick_device(name)
    if device.type == "mps":
        raise UserError(f"model.device = {name!r}: an Apple GPU cannot be shared by several ranks; set it to cpu")
    if device.type != "cuda":
        return device
    if name not in ("auto", "cuda"):
        raise UserError(f"model.device = {name!r}: must be auto, cpu or cuda with several ranks, each with its own GPU")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of this name, for weights; `auto` is bfloat16, but float32 on a CPU, where bfloat16 is slow."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise UserError(f"model.dtype = {name!r}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """Returns the device's product name, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"Apple GPU ({platform.machine()})"
    return _cpu_name()


def be_deterministic(device: torch.device) -> None:
    """Makes equal computations on this device give equal bits, at some cost in speed. Must be called before the device
    is first used, because cuBLAS chooses its workspace only once. A CPU with a fixed number of threads is deterministic
    anyway."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products on several streams may differ
        torch.use_deterministic_algorithms(True)


def avoid_fragments(device: torch.device) -> None:
    """Lets memory that torch has taken on an NVIDIA GPU grow in place, so that blocks of many sizes leave no gaps. Must
    be called before the device is first used. Does nothing if one of `ALLOCATOR_VARIABLES` is set."""
    if device.type == "cuda" and torch.version.cuda and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """Limits the GPU memory that this process takes for tensors to `num_bytes`. At the limit torch first frees its
    cache. Does nothing for devices other than CUDA."""
    if device.type == "cuda":
        share = num_bytes / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), device)


def synchronize(device: torch.device) -> None:
    """Waits until all work on the device is done; needed before measuring time. Where an engine may share the process,
    wait for a stream instead (`recording_lock`)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def empty_cache(device: torch.device) -> None:
    """Frees the device memory that torch holds in its cache but does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Returns a GPU's free and total memory in bytes; None for a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total
    return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # on Linux platform.processor() gives only the architecture
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


M = TypeVar("M", bound=nn.Module)


@cache
def is_emulated() -> bool:
    """Whether this machine's CPU lacks fast multiplication of bfloat16."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_slow(tensor: Tensor) -> bool:
    """Whether products with this tensor should be computed in float32, because its dtype is slow on its device."""
    return tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and is_emulated()


def spare(model: M) -> M:
    """Makes linear layers multiply in float32 where bfloat16 weights are slow (`is_slow`); returns the same model."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and is_slow(layer.weight):
            layer.forward = MethodType(_linear, layer)  # type: ignore[method-assign]
    return model


def _linear(layer: nn.Linear, values: Tensor) -> Tensor:
    if not is_slow(layer.weight):  # moved or cast since
        return F.linear(values, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(values.float(), layer.weight.float(), bias).to(layer.weight.dtype)
