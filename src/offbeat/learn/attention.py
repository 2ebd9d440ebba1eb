"""Attention over packed rows, for any transformers model.

Registered with transformers under `NAME`; a model that uses it is called with `layout=` (see `packing`). Sequences are
gathered from the row bucket by bucket, go through torch's causal attention, and come back. With right-padded sequences
plain causality is enough: padding lies behind every real token, so no mask is ever built.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from offbeat.errors import UserError
from offbeat.learn.packing import Layout

NAME = "offbeat_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """From (1, heads, row, dim) to (1, row, heads, dim), as transformers' own attention functions do."""
    if softcap is not None or s_aux is not None:
        raise UserError(f"model.path: {type(module).__name__} changes attention scores in a way packed rows cannot")
    query, key, value = query[0], key[0], value[0]
    repeats = query.shape[0] // key.shape[0]
    results = []
    for table in layout.buckets:
        num_samples, length = table.shape
        flat = table.reshape(-1)

        def gather(
            states: Tensor, copies: int, flat: Tensor = flat, shape: tuple[int, int] = (num_samples, length)
        ) -> Tensor:
            taken = states.index_select(1, flat).unflatten(1, shape).transpose(0, 1)
            return taken.repeat_interleave(copies, dim=1) if copies > 1 else taken

        mask = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=query.device)
            behind = at[:, None] - at[None, :]
            mask = (behind >= 0) & (behind < sliding_window)
        out = scaled_dot_product_attention(
            gather(query, 1),
            gather(key, repeats),
            gather(value, repeats),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
        )
        results.append(out.transpose(1, 2).reshape(num_samples * length, out.shape[1], out.shape[3]))
    return torch.cat(results).index_select(0, layout.restore).unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)


def use(model: PreTrainedModel) -> None:
    """Switches a model to packed rows, or says why it cannot be."""
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(f"model.path: {kind} does not take attention functions, which Offbeat trains with")
    model.set_attn_implementation(NAME)
