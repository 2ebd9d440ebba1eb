"""A value head on the policy's own last layer: what reward is to be expected, token by token.

It reads the very activations that the output layer reads, so it costs one product with a vector. It starts at 0, lives
in checkpoints beside the optimizer's state, and is no part of any version: engines do not need it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.errors import UserError


class ValueHead:
    """Watches a model's output layer; `values` are those of the forward pass made last."""

    def __init__(self, model: PreTrainedModel):
        output = model.get_output_embeddings()
        if output is None:
            raise UserError(
                f'loss.advantage = "gae": {type(model).__name__} has no output layer to put a value head on'
            )
        self.linear = torch.nn.Linear(output.weight.shape[1], 1, device=output.weight.device)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self._hidden: Tensor | None = None
        output.register_forward_pre_hook(self._see)

    def _see(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._hidden = args[0]

    def values(self) -> Tensor:
        """Of each position whose logits were computed, in their shape."""
        assert self._hidden is not None, "the value head has seen no forward pass"
        hidden, self._hidden = self._hidden, None  # or a forward pass's activations would live until the next
        return self.linear(hidden.float()).squeeze(-1)
