"""Puts a published version's tensors in place of a model's own, all or none.

Every name, shape and dtype is checked against the file headers before the first byte is written: what is refused
leaves the model as it was. Of tied tensors, which share their memory, the files need only hold one.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from offbeat.rollout.engine import EngineError, Version

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_version(model: PreTrainedModel, version: Version) -> None:
    """Reads all safetensors files of the version's folder into the model."""
    paths = sorted(version.path.glob("*.safetensors"))
    if not paths:
        raise EngineError(f"version {version.number}: no *.safetensors file in {version.path}")
    state = model.state_dict()
    with ExitStack() as files:
        found: dict[str, Any] = {}
        for path in paths:
            try:
                opened = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise EngineError(f"version {version.number}: {path} cannot be read: {error}") from error
            found |= dict.fromkeys(opened.keys(), opened)
        _check_names(version, state, found)
        for name, file in found.items():
            _check_tensor(version, name, state[name], file.get_slice(name))
        with torch.no_grad():
            for name, file in found.items():
                state[name].copy_(file.get_tensor(name))


def _check_names(version: Version, state: dict[str, torch.Tensor], found: dict[str, Any]) -> None:
    unknown = sorted(set(found) - set(state))
    if unknown:
        raise EngineError(f"version {version.number}: {unknown[0]} ({len(unknown)} in all) is no tensor of the model")
    covered = {_place(state[name]) for name in found}
    missing = sorted(name for name, tensor in state.items() if _place(tensor) not in covered)
    if missing:
        raise EngineError(
            f"version {version.number}: {missing[0]} ({len(missing)} in all) is missing in {version.path}"
        )


def _check_tensor(version: Version, name: str, tensor: torch.Tensor, stored: Any) -> None:
    shape, dtype = tuple(stored.get_shape()), DTYPES.get(stored.get_dtype())
    if shape != tuple(tensor.shape):
        raise EngineError(f"version {version.number}: {name} has shape {shape}, the model {tuple(tensor.shape)}")
    if dtype is None or torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
        raise EngineError(
            f"version {version.number}: {name} is {stored.get_dtype()} and would be rounded to {tensor.dtype}; "
            "load the model in the dtype that is published"
        )


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies: equal for tied ones."""
    return tensor.data_ptr(), tensor.numel()
