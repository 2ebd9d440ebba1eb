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
from offbeat.model.half import is_slow

NAME = "offbeat_packed"
SHORT_TOKENS = 128
"""Up to here the scores of a bucket are small enough to be written out."""


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
    if is_slow(query):
        wide = (query.float(), key.float(), value.float(), attention_mask)
        how = {"layout": layout, "scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return packed_attention(module, *wide, **how)[0].to(query.dtype), None  # type: ignore[arg-type]
    num_kv_heads, scale = key.shape[1], scaling if scaling is not None else query.shape[-1] ** -0.5
    results = []
    for table in layout.buckets:
        q, k, v = (_gather(states[0], table, num_kv_heads) for states in (query, key, value))
        length = table.shape[1]
        window = sliding_window if sliding_window is not None and sliding_window < length else None
        attend = _short if query.device.type == "cpu" and length <= SHORT_TOKENS and not dropout else _long
        results.append(attend(q, k, v, scale, window, dropout))
    return torch.cat(results).index_select(0, layout.restore).unsqueeze(0), None


def _gather(states: Tensor, table: Tensor, num_kv_heads: int) -> Tensor:
    """From a row (heads, row, dim) to a bucket (samples, kv heads, heads per kv head, length, dim)."""
    taken = states.index_select(1, table.reshape(-1)).unflatten(1, table.shape).transpose(0, 1)
    return taken.unflatten(1, (num_kv_heads, -1))


def _short(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    """Plain matrix products: on a CPU, fused kernels spend more on short sequences than these do."""
    samples, kv_heads, per_kv_head, length, dim = query.shape
    scores = query.reshape(samples, kv_heads, per_kv_head * length, dim) @ (key[:, :, 0] * scale).transpose(-1, -2)
    scores = scores.unflatten(2, (per_kv_head, length)) + _causal_bias(length, window, query)
    out = (scores.softmax(-1).flatten(2, 3) @ value[:, :, 0]).unflatten(2, (per_kv_head, length))
    return out.permute(0, 3, 1, 2, 4).reshape(samples * length, kv_heads * per_kv_head, dim)


def _long(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    """torch's fused attention."""
    per_kv_head = query.shape[2]
    out = scaled_dot_product_attention(
        query.flatten(1, 2),
        key.expand(-1, -1, per_kv_head, -1, -1).flatten(1, 2),
        value.expand(-1, -1, per_kv_head, -1, -1).flatten(1, 2),
        attn_mask=None if window is None else _causal_bias(query.shape[3], window, query),
        is_causal=window is None,
        dropout_p=dropout,
        scale=scale,
    )
    return out.transpose(1, 2).flatten(0, 1)


def _causal_bias(length: int, window: int | None, like: Tensor) -> Tensor:
    """0 where a token may look, minus infinity elsewhere."""
    at = torch.arange(length, device=like.device)
    behind = at[:, None] - at[None, :]
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


AttentionInterface.register(NAME, packed_attention)


def use(model: PreTrainedModel) -> None:
    """Switches a model to packed rows, or says why it cannot be."""
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(f"model.path: {kind} does not take attention functions, which Offbeat trains with")
    model.set_attn_implementation(NAME)
