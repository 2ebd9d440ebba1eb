"""AdamW on a CPU whose result for a number does not depend on its place in a tensor.

torch's kernel computes the last numbers of a tensor, which do not fill a vector register, one by one and rounds them
differently. Which numbers these are depends on how rows are divided among ranks. Here they are computed in full
registers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EVEN_NUMBERS = 64
"""A multiple of every vector register's length, in numbers."""


class EvenAdamW(torch.optim.AdamW):
    """AdamW for parameters on the CPU, all of which are updated together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        (group,) = self.param_groups
        whole: list[list[Tensor]] = [[], [], [], []]
        tails: list[list[Tensor]] = [[], [], [], []]
        step = torch.zeros(())
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            step = state["step"]
            even = parameter.numel() // EVEN_NUMBERS * EVEN_NUMBERS
            for i, tensor in enumerate((parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])):
                flat = tensor.contiguous().view(-1)
                if even:
                    whole[i].append(flat[:even])
                tails[i].append(flat[even:])
        joined = [torch.cat(parts) for parts in tails]
        padding = -len(joined[0]) % EVEN_NUMBERS
        padded = [torch.nn.functional.pad(one, (0, padding)) for one in joined]
        for i, one in enumerate(padded):
            whole[i].append(one)
        _update(group, whole, step)
        for parts, one in zip(tails, padded, strict=True):
            ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
            for part, end in zip(parts, ends, strict=True):
                part.copy_(one[end - len(part) : end])


def _update(group: dict[str, Any], tensors: list[list[Tensor]], step: Tensor) -> None:
    torch._fused_adamw_(
        tensors[0],
        tensors[1],
        tensors[2],
        tensors[3],
        [],
        [step] * len(tensors[0]),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
