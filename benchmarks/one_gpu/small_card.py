"""Makes a large GPU report the memory of a smaller one. It is copied into a folder on PYTHONPATH as `sitecustomize.py`,
which Python imports at its start.

With `BYTES` in the environment, whoever asks for a card's memory is told that many bytes in total, and what of them is
not in use on the real card as free. Nothing is enforced: a process may still take more than the smaller card has. A
share of the card that a process allows itself is one of the smaller card.
Functions are replaced when their modules are imported, so that a process that never imports torch loses nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

BYTES = "SMALL_CARD_BYTES"
"""Environment variable with the smaller card's memory. Offbeat hides its own variables (OFFBEAT_...) from engines."""


def of_pair(read: Callable[..., tuple[int, int]], num_bytes: int) -> Callable[..., tuple[int, int]]:
    """Wraps a function that returns the free and the total memory."""

    def reading(*arguments: Any, **options: Any) -> tuple[int, int]:
        free, total = read(*arguments, **options)
        return max(num_bytes - (total - free), 0), num_bytes

    return reading


def of_struct(read: Callable[..., Any], num_bytes: int) -> Callable[..., Any]:
    """Wraps NVML's function, which returns a structure; its `used` stays as it is."""

    def reading(*arguments: Any, **options: Any) -> Any:
        info = read(*arguments, **options)
        info.free, info.total = max(num_bytes - (info.total - info.free), 0), num_bytes
        return info

    return reading


def of_share(limit: Callable[..., None], num_bytes: int) -> Callable[..., None]:
    """Wraps the function that limits a process to a share of the card."""

    def limiting(share: float, device: Any = None) -> None:
        from torch.cuda import get_device_properties

        limit(share * num_bytes / get_device_properties(device).total_memory, device)

    return limiting


WRAPPED: dict[str, dict[str, Callable[..., Callable[..., Any]]]] = {
    "torch.cuda.memory": {"mem_get_info": of_pair, "set_per_process_memory_fraction": of_share},
    "torch.accelerator.memory": {"get_memory_info": of_pair},  # vLLM sizes its cache by it
    "vllm.third_party.pynvml": {"nvmlDeviceGetMemoryInfo": of_struct},  # vLLM takes defaults for large cards by it
}
"""How to wrap functions, by the module that defines them and by their name."""


class Finder:
    """Finds the modules in `WRAPPED` where Python finds them, and wraps their functions once they have been executed:
    before other modules can copy them."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in WRAPPED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute, wrapped = spec.loader.exec_module, WRAPPED[name]

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for function, wrap in wrapped.items():
                if hasattr(module, function):
                    setattr(module, function, wrap(getattr(module, function), self.num_bytes))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if BYTES in os.environ:
    sys.meta_path.insert(0, Finder(int(os.environ[BYTES])))
