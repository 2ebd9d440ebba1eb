"""The GPUs that this process may use, found without torch, and their division among child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.errors import UserError

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def visible_gpus(environment: Mapping[str, str] = os.environ, nvidia: Path = NVIDIA, amd: Path = AMD) -> list[str]:
    """Returns the GPUs that this process may use, as words for `CUDA_VISIBLE_DEVICES`: those that this variable names
    (a scheduler sets it), or else all that the machine's drivers know."""
    given = environment.get(VARIABLE)
    if given is not None:
        named = [word.strip() for word in given.split(",")]
        return [word for word in named if word] if "-1" not in named else []
    if nvidia.is_dir():
        return [str(number) for number, _ in enumerate(nvidia.iterdir())]
    identifiers = [file.read_text().strip() for file in amd.glob("*/gpu_id")]
    return [str(number) for number, _ in enumerate(name for name in identifiers if name != "0")]


def chosen_gpus(words: str | None) -> list[str]:
    """Returns the GPUs that the option `--devices` names, such as "0,2"; None: all that this process may use."""
    found = visible_gpus()
    if words is None:
        return found
    chosen = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in found]
    if unknown or len(set(chosen)) < len(chosen) or not chosen:
        which = f"{unknown[0]} is not a GPU that this process may use" if unknown else "names no GPU, or one twice"
        raise UserError(f"--devices {words}: {which}; there are {', '.join(found) or 'none'}")
    return chosen


def shares(gpus: Sequence[str], num_workers: int, per_worker: int) -> list[list[str]]:
    """Returns the GPUs of each of `num_workers` workers, `per_worker` neighbouring ones for each; none for any if there
    are none. If there are fewer, workers share them in turn."""
    if len(gpus) < per_worker:
        return [list(gpus)] * num_workers
    places = len(gpus) // per_worker
    firsts = [number % places * per_worker for number in range(num_workers)]
    return [list(gpus[first : first + per_worker]) for first in firsts]
