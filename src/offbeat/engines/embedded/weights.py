"""Loads a published version's tensors into a model, all or none, in two steps.

`stage` reads the files and copies the tensors to the model's device while generation goes on. `swap` copies them over
the model's own tensors; generation stops only for that. Every name, shape and dtype is checked before the first byte is
written. For tied tensors, which share memory, one name in the files is enough.

A version that is an adapter replaces the model's adapter. If that adapter was trained on other base weights than the
model has, the version must include those weights, which then replace the model's. Otherwise the version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.engines.protocol import EngineError, Version
from offbeat.model.lora import adapter_tensors, base_tensors, scale_of
from offbeat.weights.version import ADAPTER_CONFIG, base_digest

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool},
}


@dataclass(frozen=True)
class Staged:
    """A version's tensors, ready to be copied over the model's own."""

    base: str | None
    """Digest of the weights that the version's adapter belongs to; None if the version is not an adapter."""
    pairs: list[tuple[Tensor, Tensor]]
    """The model's own tensors, each with its replacement."""


def stage(model: PreTrainedModel, version: Version, base: str | None = None) -> Staged:
    """Reads and checks a version's tensors, so that `swap` only has to copy them; may run in any thread. `base` is the
    digest of the weights that the model's adapters belong to; None for a model without adapters."""
    try:
        wanted = base_digest(version.path)
    except (OSError, ValueError) as error:
        raise EngineError(f"version {version.number}: {version.path} cannot be read: {error}") from error
    if (base is None) != (wanted is None):
        is_one, without = ("is an adapter", "without one") if base is None else ("is not an adapter", "with one")
        raise EngineError(
            f"version {version.number}: {is_one}, but the model was loaded {without}; give this worker the run's own "
            "model.lora_rank"
        )
    if wanted is None:
        return Staged(None, _read(model.state_dict(), version, version.path))
    pairs = _read(adapter_tensors(model), version, version.path)
    config = json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if (scale := config["lora_alpha"] / config["r"]) != scale_of(model):
        raise EngineError(
            f"version {version.number}: its adapter has the scale {scale:g}, but the model's has {scale_of(model):g}; "
            "give this worker the run's own model.lora_alpha"
        )
    if wanted != base:
        if version.base is None:
            raise EngineError(
                f"version {version.number}: its adapter needs base weights with digest {wanted[:12]}, but those at "
                f"model.path have digest {base:.12}; give this worker the model that the run began with, or set "
                'weights.deltas = "always"'
            )
        pairs += _read(base_tensors(model), version, version.base)
    return Staged(wanted, pairs)


def swap(staged: Staged) -> None:
    with torch.no_grad():
        for own, tensor in staged.pairs:
            own.copy_(tensor)
    if staged.pairs and staged.pairs[0][0].device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # another stream may take the replacements' memory next


def _read(state: Mapping[str, Tensor], version: Version, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs of a tensor of `state` and its replacement, read from the safetensors files in `folder`. Raises an
    `EngineError` if names, shapes or dtypes do not fit."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"version {version.number}: there is no *.safetensors file in {folder}")
    with ExitStack() as files:
        found: dict[str, Any] = {}
        for path in paths:
            try:
                opened = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise EngineError(f"version {version.number}: {path} cannot be read: {error}") from error
            found |= dict.fromkeys(opened.keys(), opened)
        _check_names(version, state, found, folder)
        for name, file in found.items():
            _check_tensor(version, name, state[name], file.get_slice(name))
        return [(state[name], _to_device(file.get_tensor(name), state[name])) for name, file in found.items()]


def _to_device(tensor: Tensor, own: Tensor) -> Tensor:
    """Returns the tensor moved to the device of `own`, or the tensor itself if that device's memory is full."""
    try:
        return tensor.to(own.device)
    except torch.OutOfMemoryError:
        return tensor


def _check_names(version: Version, state: Mapping[str, Tensor], found: dict[str, Any], folder: Path) -> None:
    unknown = sorted(set(found) - set(state))
    if unknown:
        raise EngineError(
            f"version {version.number}: {folder} has the tensor {unknown[0]}, which this worker's model lacks (unknown "
            f"tensors: {len(unknown)}); give this worker the model settings of the run"
        )
    covered = {_memory(state[name]) for name in found}
    missing = sorted(name for name, tensor in state.items() if _memory(tensor) not in covered)
    if missing:
        raise EngineError(
            f"version {version.number}: {folder} has no tensor {missing[0]} (missing tensors: {len(missing)}); give "
            "this worker the model settings of the run"
        )


def _check_tensor(version: Version, name: str, tensor: Tensor, stored: Any) -> None:
    shape, dtype = tuple(stored.get_shape()), DTYPES.get(stored.get_dtype())
    if shape != tuple(tensor.shape):
        raise EngineError(
            f"version {version.number}: {name} has shape {shape}, but in this worker's model {tuple(tensor.shape)}; "
            "give this worker the model settings of the run"
        )
    if dtype is None or torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
        raise EngineError(
            f"version {version.number}: {name} is {stored.get_dtype()}, which does not fit into the model's "
            f"{tensor.dtype}; set model.dtype to the dtype of the run's weights"
        )


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns the address and size of a tensor, which are equal for tied tensors."""
    return tensor.data_ptr(), tensor.numel()
