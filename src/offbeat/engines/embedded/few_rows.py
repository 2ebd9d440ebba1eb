"""Matrix products of decode steps on a CPU: a few rows, each a request's current token, with a large weight.

MKL computes `values @ weight.T` for 4 to 48 rows by a kernel that reads the weight slowly. The same product with the
roles exchanged, `weight @ values.T`, reads it at the speed of memory. Two cores need 52 instead of 85 ms for the
products of a 135M model with 8 rows, and 53 instead of 136 ms with 16. For fewer and for more rows the usual order is
faster.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

MIN_ROWS, MAX_ROWS = 4, 48
MIN_ELEMENTS = 1 << 16
"""Smallest weight worth it; smaller ones lie in the cache of a core."""


def product(
    values: Tensor, weight: Tensor, bias: Tensor | None, min_rows: int = MIN_ROWS, max_rows: int = MAX_ROWS
) -> Tensor:
    """Returns `F.linear(values, weight, bias)`, computed in the other order if `values` has the shape of a decode step,
    (rows, 1, features), and a number of rows within the limits."""
    if values.dim() != 3 or values.size(1) != 1 or values.size(0) < min_rows or values.size(0) > max_rows:
        return F.linear(values, weight, bias)
    found = torch.mm(weight, values.squeeze(1).t()).t().contiguous()
    if bias is not None:
        found = found + bias
    return found.unsqueeze(1)


@cache
def _scripted() -> Any:
    return torch.jit.script(product)  # so that a traced decode step decides anew for each number of rows


def use_few_rows(model: PreTrainedModel) -> None:
    """Makes the model's large float32 layers use `product` where that is faster: on a CPU with MKL."""
    if not torch.backends.mkl.is_available():
        return
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.numel() < MIN_ELEMENTS:
            continue
        if layer.weight.dtype is torch.float32 and layer.weight.device.type == "cpu":
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, values: Tensor) -> Tensor:
    found: Tensor = _scripted()(values, layer.weight, layer.bias)
    return found
