"""Chooses the inference engine for a machine where `rollout.engine = "auto"`: vLLM on a GPU, else the embedded engine.

`offbeat train` chooses once, for a new run, and records the choice; a resumed run keeps it. A run of `offbeat serve`
keeps "auto", and each worker that joins it chooses for its own machine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from offbeat.config import Config, from_dict, resolved
from offbeat.config.schema import SERVED

AUTO = "auto"
GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/nvmap")
"""Files that show that the driver of an NVIDIA or AMD GPU is loaded, also in WSL and on Jetson. One is enough."""
FIND_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
FIND_WITHIN_S = 60.0
INSTALL_VLLM = "pip install vllm, or name the Python of an environment that has it with --engine.python"


class Choice(NamedTuple):
    engine: Literal["vllm", "embedded"]
    why: str
    remedy: str = ""
    """How to get vLLM, if only vLLM is missing."""

    @property
    def told(self) -> str:
        more = f"; vLLM is many times faster on a GPU: {self.remedy}" if self.remedy else ""
        return f"{self.engine}: {self.why}{more}"


def choose(config: Config, *, has_gpu: bool, has_vllm: Callable[[], bool]) -> Choice:
    """Returns the engine for a configuration with `rollout.engine = "auto"`. `has_vllm` is slow, so it is called only
    if the configuration allows vLLM and there is a GPU."""
    if obstacle := _why_embedded(config):
        return Choice("embedded", f"vLLM cannot be used with {obstacle}")
    if not has_gpu:
        return Choice("embedded", "there is no GPU here")
    if not has_vllm():
        return Choice("embedded", "vLLM is not installed here", INSTALL_VLLM)
    return Choice("vllm", "there is a GPU here, and vLLM is installed")


def _why_embedded(config: Config) -> str:
    """Returns the setting that vLLM cannot run with, or "" if there is none."""
    device, has_adapters = config.model.device, config.model.lora_rank > 0
    obstacles = {
        "run.exact = true": config.run.exact,
        f'model.device = "{device}"': device.partition(":")[0] in ("cpu", "mps"),
        'model.dtype = "float32" and model.lora_rank': has_adapters and config.model.dtype == "float32",
        'rollout.kv = "stale" and model.lora_rank': has_adapters and config.rollout.kv == "stale",
        'rollout.kv = "stale" and schedule.mode = "alternate"': (
            config.rollout.kv == "stale" and config.schedule.mode != "overlap"
        ),
    }
    return next((what for what, holds in obstacles.items() if holds), "")


def with_chosen_engine(config: Config) -> tuple[Config, Choice | None]:
    """Returns the configuration with the engine chosen for this machine, and the choice. If the chosen engine runs as a
    server and `rollout.workers` is not set, `rollout.workers` becomes 1, because a server needs a worker process. A
    configuration that names its engine is returned as it is, with None as the choice."""
    if config.rollout.engine != AUTO:
        return config, None
    choice = choose(config, has_gpu=has_gpu(), has_vllm=lambda: has_vllm(config.engine.python))
    return with_engine(config, choice.engine, config.rollout.workers or 1), choice


def with_engine(config: Config, engine: str, num_workers: int | None) -> Config:
    """Returns the configuration with `rollout.engine` set to `engine`. If this engine runs as a server and
    `rollout.workers` is not set, `rollout.workers` is set to `num_workers`."""
    keys: dict[str, object] = {"rollout.engine": engine}
    if engine in SERVED and config.rollout.workers is None:
        keys["rollout.workers"] = num_workers
    return from_dict(resolved(config), keys)


def announce(choice: Choice | None, config: Config) -> None:
    """Prints the chosen engine on a machine with a GPU. On other machines there is nothing to choose."""
    if choice and has_gpu() and config.log.console != "quiet":
        print(f"engine {choice.told}", flush=True)


def has_gpu() -> bool:
    """Whether a driver of an NVIDIA or AMD GPU is loaded, and CUDA_VISIBLE_DEVICES does not hide all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and has_gpu_driver()


def has_gpu_driver() -> bool:
    return any(os.path.exists(path) for path in GPU_DRIVERS)


def has_vllm(python: str | None) -> bool:
    """Returns whether vLLM is installed for the Python at path `python`; None: the Python that runs this code."""
    if python is None:
        return importlib.util.find_spec("vllm") is not None
    command = (str(Path(python).expanduser()), "-c", FIND_VLLM)
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=FIND_WITHIN_S)
        return found.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
