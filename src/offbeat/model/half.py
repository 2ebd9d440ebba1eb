"""bfloat16 on CPUs without instructions for it.

There torch multiplies bfloat16 some hundred times slower than float32. So products are computed in float32 and rounded
once, as the instructions do elsewhere: weights, their gradients and what passes between layers stay bfloat16.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


@cache
def is_emulated() -> bool:
    """Whether this machine's CPU has no fast product of bfloat16."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_slow(tensor: Tensor) -> bool:
    """Whether products of such a tensor should be computed in float32."""
    return tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and is_emulated()


def spare(model: M) -> M:
    """Lets the linear layers of a model compute as the module says, where that is faster; returns the model."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and is_slow(layer.weight):
            layer.forward = MethodType(_linear, layer)  # type: ignore[method-assign]
    return model


def _linear(layer: nn.Linear, values: Tensor) -> Tensor:
    if not is_slow(layer.weight):  # it was moved, or given another dtype, since
        return F.linear(values, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(values.float(), layer.weight.float(), bias).to(layer.weight.dtype)
