"""Attention over packed rows, for any transformers model.

A packed row holds many sequences, with a shared prompt only once (see `packing`). The attention is registered with
transformers under `NAME`; a model that uses it must be called with `layout=`, a `RowLayout`.

Attention has two forms. On NVIDIA GPUs in half precision, torch's variable-length flash attention reads queries where
they lie in the row. A prompt's keys and values are repeated for each answer, its queries are not. Everywhere else, and
for soft-capped scores and attention sinks, sequences of similar length (a bucket) are gathered from the row and padded
on the right. They go through causal attention, which hides the padding without a mask, and are put back into the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from offbeat.model.devices import is_slow
from offbeat.model.usage import Usage, usage, window_of
from offbeat.trainer.packing import RowLayout, Varlen

NAME = "offbeat_packed"
MAX_VARLEN_DIM = 256
"""Largest head dimension that torch's variable-length kernel takes."""
SHORT_TOKENS = 128
"""On a CPU, buckets whose sequences have up to this many tokens use plain matrix products (`_written_out`)."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: RowLayout,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes attention within each sequence of a packed row, with parameters and result as in transformers.

    `query`, `key` and `value` are (1, heads, row, dim); the result is (1, row, heads, dim). `softcap` bounds the
    scores; `s_aux` holds each head's attention-sink score.
    """
    if is_slow(query):
        wide = (query.float(), key.float(), value.float(), attention_mask)
        how = {"layout": layout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return packed_attention(module, *wide, **how)[0].to(query.dtype), None  # type: ignore[arg-type]
    num_kv_heads, scale = key.shape[1], scaling if scaling is not None else query.shape[-1] ** -0.5
    is_plain, own_window = softcap is None and s_aux is None, window_of(module)
    if is_plain and takes_varlen(query, value):
        return _varlen(query, key, value, layout.varlen, scale, own_window), None
    results = []
    for table in layout.buckets:
        q, k, v = (_gather(states[0], table, num_kv_heads) for states in (query, key, value))
        length = table.shape[1]
        window = own_window if own_window is not None and own_window < length else None
        if is_plain and (query.device.type != "cpu" or length > SHORT_TOKENS):
            results.append(_fused(q, k, v, scale, window))
        else:
            results.append(_written_out(q, k, v, scale, window, softcap, s_aux))
    return torch.cat(results).index_select(0, layout.restore).unsqueeze(0), None


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's variable-length attention kernel accepts tensors like `query` and `value` on their device."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= MAX_VARLEN_DIM
        and varlen_kernel() is not None
    )


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Returns torch's attention for sequences of uneven length; None if this release of torch lacks it, or lacks
    windows in it. The import takes a second."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters
    if "window_size" not in options:
        return None
    # torch 2.11 shares KV heads among query heads unasked; later releases want to be asked
    return partial(varlen_attn, enable_gqa=True) if "enable_gqa" in options else varlen_attn


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: Varlen, scale: float, window: int | None) -> Tensor:
    """Computes attention without padding. The kernel aligns the last query of each run (a prompt, or a response without
    its last token) with the run's last key, so its causal mask hides from each query exactly the later keys."""
    attend = varlen_kernel()
    assert attend is not None
    keys, values = (_Repeated.apply(states[0].transpose(0, 1), layout) for states in (key, value))
    behind = -1 if window is None else window - 1
    found: Tensor = attend(
        query[0].transpose(0, 1),
        keys,
        values,
        layout.query_ends,
        layout.key_ends,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        window_size=(behind, 0),
    )
    return found.unsqueeze(0)


class _Repeated(torch.autograd.Function):
    """Returns the entries of `states`, (row, heads, dim), at the row positions in `Varlen.keys`; these repeat a
    prompt's positions for each of its responses. The backward pass adds up a repeated position's gradients in a fixed
    order, so equal input gives equal bits."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: Varlen) -> Tensor:
        ctx.layout = layout
        return states.index_select(0, layout.keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout: Varlen = ctx.layout
        flat = grads[0].flatten(1)
        return embedding_bag(layout.uses, flat, layout.first_uses, mode="sum").unflatten(1, grads[0].shape[1:]), None


def _gather(states: Tensor, table: Tensor, num_kv_heads: int) -> Tensor:
    """Returns the states of a bucket's sequences, as (samples, KV heads, heads per KV head, length, dim). `states` are
    those of the whole row, (heads, row, dim); `table` holds the row position of each token, (samples, length)."""
    taken = states.index_select(1, table.reshape(-1)).unflatten(1, table.shape).transpose(0, 1)
    return taken.unflatten(1, (num_kv_heads, -1))


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention with plain matrix products: on a CPU they are faster than fused kernels for short sequences,
    and no fused kernel supports `softcap` and `sinks`."""
    samples, kv_heads, per_kv_head, length, dim = query.shape
    scores = query.reshape(samples, kv_heads, per_kv_head * length, dim) @ (key[:, :, 0] * scale).transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.unflatten(2, (per_kv_head, length)) + _causal_bias(length, window, query)
    if sinks is not None:
        nowhere = sinks.to(scores.dtype).view(1, kv_heads, per_kv_head, 1, 1).expand(samples, -1, -1, length, 1)
        weights = torch.cat((scores, nowhere), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights.flatten(2, 3) @ value[:, :, 0]).unflatten(2, (per_kv_head, length))
    return out.permute(0, 3, 1, 2, 4).reshape(samples * length, kv_heads * per_kv_head, value.shape[-1])


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    per_kv_head = query.shape[2]
    out = scaled_dot_product_attention(
        query.flatten(1, 2),
        key.expand(-1, -1, per_kv_head, -1, -1).flatten(1, 2),
        value.expand(-1, -1, per_kv_head, -1, -1).flatten(1, 2),
        attn_mask=None if window is None else _causal_bias(query.shape[3], window, query),
        is_causal=window is None,
        scale=scale,
    )
    return out.transpose(1, 2).flatten(0, 1)


def _causal_bias(length: int, window: int | None, like: Tensor) -> Tensor:
    """Returns a (length, length) bias for scores: 0 where a token may attend (to itself and earlier tokens, within
    `window` if it is not None), minus infinity elsewhere."""
    at = torch.arange(length, device=like.device)
    behind = at[:, None] - at[None, :]
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(length, length, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


AttentionInterface.register(NAME, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> Usage:
    """Switches a model to attention over packed rows if the model supports it; returns how the model can be run."""
    found = usage(model)
    if found.packs:
        model.set_attn_implementation(NAME)
    return found
