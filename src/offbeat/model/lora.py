"""Low-rank adapters (LoRA) in a model with frozen weights: adds, reads, disables and merges them.

The adapted layers are modules of peft inside the model, so trainer and engine run them with the same arithmetic. An
adapter has the dtype of its layer. At the start its first matrix is random, drawn from the run's seed, and its second
matrix is 0. So the model's outputs equal those of the loaded model to the bit. Published tensors and configuration use
peft's names, so that peft and vLLM can read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from offbeat.errors import OffbeatError, UserError
from offbeat.extras import import_extra
from offbeat.model.loading import load_model, load_shape, state_tensors
from offbeat.spelling import suggest

NAME = "default"
"""peft's name for the adapter; there is only one."""
PREFIX = "base_model.model."
"""Prefix that peft puts before a layer's name."""


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    """The adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of layers to adapt, such as `q_proj`; empty: all linear layers but the output layer."""


def load_adapted(path: str | Path, dtype: torch.dtype, device: torch.device, lora: Lora, seed: int) -> PreTrainedModel:
    """Loads a frozen model with new adapters; wrong targets raise a `UserError` before the weights are read."""
    import_extra("peft", "lora", "model.lora_rank")
    find_layers(load_shape(path), lora.targets)
    model = load_model(path, dtype, device)
    attach(model, lora, seed)
    return model


def attach(model: PreTrainedModel, lora: Lora, seed: int = 0) -> None:
    """Freezes a model and adds new adapters to it, initialised from `seed`."""
    peft = import_extra("peft", "lora", "model.lora_rank")
    model.requires_grad_(False)
    layers = find_layers(model, lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in layers),
    )
    with torch.random.fork_rng(devices=[]):  # peft's random weights are replaced below
        peft.inject_adapter_in_model(config, model, NAME)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in _layers(model).values():
            first, second, own = layer.lora_A[NAME], layer.lora_B[NAME], layer.get_base_layer().weight
            for half in (first, second):
                half.to(device=own.device, dtype=own.dtype)
            bound = 1 / math.sqrt(first.weight.shape[1])
            first.weight.copy_(torch.rand(first.weight.shape, generator=random) * (2 * bound) - bound)
            second.weight.zero_()


def find_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Returns the full names of the linear layers whose names end in one of `targets`; without targets, those of all
    linear layers but the output layer."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    output = model.get_output_embeddings()
    if not targets:
        return [name for name, module in linear.items() if module is not output]
    chosen = set()
    for target in targets:
        found = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not found:
            ends = sorted({_end(name) for name, module in linear.items() if module is not output})
            raise UserError(f"model.lora_targets = {target!r}: no linear layer has this name; {suggest(target, ends)}")
        if any(linear[name] is output for name in found) and model.config.get_text_config().tie_word_embeddings:
            raise UserError(
                f"model.lora_targets = {target!r}: the output layer shares the input layer's weights, so it cannot be "
                "adapted; leave it out"
            )
        chosen.update(found)
    return [name for name in linear if name in chosen]


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors to publish as a version (no copies): the adapter's, or all if there is no adapter."""
    return adapter_tensors(model) or state_tensors(model)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the adapter's tensors (no copies), under peft's names; empty for a model without an adapter."""
    return {
        f"{PREFIX}{name}.{half}.weight": getattr(layer, half)[NAME].weight.detach()
        for name, layer in _layers(model).items()
        for half in ("lora_A", "lora_B")
    }


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns an adapted model's frozen tensors (no copies), under their names in a model without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state_tensors(model).items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def scale_of(model: nn.Module) -> float:
    """Returns the factor (alpha / rank) by which the output of a model's adapters is multiplied."""
    return float(next(iter(_layers(model).values())).scaling[NAME])


class AdapterDisabled:
    """Calls a model with its adapters switched off: the reference model, without a second copy of the weights."""

    def __init__(self, model: PreTrainedModel):
        self.model, self._adapted = model, list(_layers(model).values())

    def __call__(self, **inputs: Any) -> Any:
        try:
            for layer in self._adapted:
                layer.enable_adapters(False)
            return self.model(**inputs)
        finally:
            for layer in self._adapted:
                layer.enable_adapters(True)


def describe(model: PreTrainedModel, lora: Lora) -> str:
    """Returns the text of peft's configuration file for the model's adapter. It leaves out the path of the base model,
    so that equal adapters have equal text."""
    layers = _layers(model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": sorted({*lora.targets}) or sorted({_end(name) for name in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
        "inference_mode": True,
    }
    return json.dumps(config, indent=1)


@torch.no_grad()
def merge(model: PreTrainedModel, adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Adds an adapter, given as tensors under peft's names and peft's configuration, to the weights of a model that has
    no adapter. Each weight is computed in float32 and rounded once."""
    scale, end = config["lora_alpha"] / config["r"], ".lora_A.weight"
    for name, first in adapter.items():
        if not name.endswith(end):
            continue
        layer = model.get_submodule(name.removeprefix(PREFIX).removesuffix(end))
        second = adapter[f"{name.removesuffix(end)}.lora_B.weight"]
        change = second.float() @ first.float() * scale
        weight = layer.weight
        assert isinstance(weight, Tensor)
        change = change.T if isinstance(layer, Conv1D) else change
        if change.shape != weight.shape:
            raise OffbeatError(
                f"adapter {name} is for a weight of shape {tuple(change.shape)}, but the model's has shape "
                f"{tuple(weight.shape)}; give the model that the adapter was trained on"
            )
        weight.copy_(weight.float() + change.to(weight.device))


def _layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers with an adapter by name, in the model's order. They are recognised by an attribute, because
    peft may not be installed."""
    return {name: module for name, module in model.named_modules() if NAME in getattr(module, "lora_A", {})}


def _end(name: str) -> str:
    return name.rpartition(".")[2]
