"""The forward pass of a decode step for models whose attention cannot be replaced: every row from its first token on.

Nothing is kept from step to step, so that a state, a convolution or an attention of the model's own is whatever its own
code makes it. That costs as many times more as a row has tokens: good for short answers and small models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Recomputed:
    """`picks_logits` lets the model leave out logits that nobody needs; how many it computes then depends on rows."""

    def __init__(self, model: PreTrainedModel, picks_logits: bool):
        self.model, self.picks_logits = model, picks_logits

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits after the token at each row's position; what stands behind it does not matter."""
        rows = torch.arange(len(tokens), device=tokens.device)
        if not self.picks_logits:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[rows, positions]
            return logits
        columns, place = positions.unique(return_inverse=True)
        picked: Tensor = self.model(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits[rows, place]
        return picked
