"""Attention over KV slots, as a function that transformers calls by name.

Transformers makes no mask for an attention that it does not know, so there are two cases: without a mask the rows are
prompts from their first token on, padded on the right, where causality alone hides the padding; with one, each row is
a single token that attends to its slot, and the mask (0 or -inf, one row per slot) is the engine's own.

A decode step may read its last rows less far than its first (`read_less`): they attend apart, with a mask of their own.

Query heads that share a KV head are folded into the query dimension: K and V are read once and never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from offbeat.model.half import is_slow
from offbeat.rollout.engine import EngineError

NAME = "offbeat_slots"
LAYER_TYPES = {"full_attention", "sliding_attention"}
NOT_UNDERSTOOD = ("softcap", "s_aux", "position_bias")
"""What some models ask of their attention and this one does not do: capped scores, sinks, learned biases."""

_less: ContextVar[torch.Tensor | None] = ContextVar("read_less", default=None)


@contextmanager
def read_less(mask: torch.Tensor | None) -> Iterator[None]:
    """Until the end of the block, the last rows of a decode step read no further than this mask of theirs does.

    A model hands on one mask and nothing else that all models know, hence this way around it.
    """
    token = _less.set(mask)
    try:
        yield
    finally:
        _less.reset(token)


def use_slot_attention(model: PreTrainedModel, max_context_tokens: int) -> None:
    """Makes this instance of a model attend through the slots, or says why it cannot."""
    kind, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False) or not model._can_set_attn_implementation():
        raise EngineError(f"embedded engine: {kind} does not let its attention be replaced, which this engine needs")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise EngineError(
            f"embedded engine: {kind} has layers of type {', '.join(sorted(unknown))}, which this engine does not know"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_context_tokens:
        raise EngineError(
            f"embedded engine: {kind} attends in chunks of {chunk} tokens; allowed max_context_tokens up to {chunk}"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < max_context_tokens:
        raise EngineError(
            f"embedded engine: max_context_tokens = {max_context_tokens}, but {kind} was made for {longest} positions"
        )
    AttentionInterface.register(NAME, slot_attention)
    model.set_attn_implementation(NAME)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query is (rows, heads, tokens, head dim), key and value (rows, KV heads, read tokens, head dim)."""
    for name in NOT_UNDERSTOOD:
        if kwargs.get(name) is not None:
            raise EngineError(f"embedded engine: {type(module).__name__} needs {name} in its attention; not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_slow(query):
        wide = (query.float(), key.float(), value.float(), None if attention_mask is None else attention_mask.float())
        return slot_attention(module, *wide, scaling, sliding_window)[0].to(query.dtype), None
    if attention_mask is None:
        return _prefill(query, key, value, scaling, sliding_window), None
    if sliding_window is not None and sliding_window < key.shape[2]:
        attention_mask = _windowed(attention_mask, sliding_window)
    return _decode(query, key, value, attention_mask, scaling), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sliding_window: int | None
) -> torch.Tensor:
    num_tokens, folded = query.shape[2], query.shape[1] != key.shape[1]
    mask = None
    if sliding_window is not None and sliding_window < num_tokens:
        age = torch.arange(num_tokens, device=query.device).unsqueeze(1) - torch.arange(num_tokens, device=query.device)
        mask = (age >= 0) & (age < sliding_window)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=folded
    )
    return out.transpose(1, 2)


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    rows, num_heads, _, head_dim = query.shape
    folded = query.reshape(rows, key.shape[1], num_heads // key.shape[1], head_dim)
    if query.device.type == "cuda":  # one kernel, with scores in float32; on CPUs three products are faster
        mask = mask.expand(rows, 1, folded.shape[2], mask.shape[-1])
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, 1, num_heads, value.shape[-1])
    less = _less.get()
    if less is None:
        return _attend(folded * scaling, key, value, mask).reshape(rows, 1, num_heads, value.shape[-1])
    num_far, reach = rows - less.shape[0], less.shape[-1]
    folded = folded * scaling
    far = _attend(folded[:num_far], key[:num_far], value[:num_far], mask[:num_far])
    near = _attend(folded[num_far:], key[num_far:, :, :reach], value[num_far:, :, :reach], less)
    return torch.cat((far, near)).reshape(rows, 1, num_heads, value.shape[-1])


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).add_(mask)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value)


def _windowed(mask: torch.Tensor, sliding_window: int) -> torch.Tensor:
    """Hides what lies a window or more behind each row's token, the last that its mask lets through."""
    index = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask == 0, index, -1).amax(-1, keepdim=True)
    return mask.masked_fill(index <= last - sliding_window, float("-inf"))
