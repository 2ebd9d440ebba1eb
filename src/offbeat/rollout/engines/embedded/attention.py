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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from offbeat.model.half import is_slow
from offbeat.model.usage import Usage, usage, window_of

NAME = "offbeat_slots"

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


def use_slot_attention(model: PreTrainedModel) -> Usage:
    """Makes this instance of a model attend through the slots, where it can be used so."""
    found = usage(model)
    if found.has_slots:
        AttentionInterface.register(NAME, slot_attention)
        model.set_attn_implementation(NAME)
    return found


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query is (rows, heads, tokens, head dim), key and value (rows, KV heads, read tokens, head dim).

    `softcap` bounds scores, and `s_aux` is a score for each head of looking nowhere.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_slow(query):
        wide = (query.float(), key.float(), value.float(), None if attention_mask is None else attention_mask.float())
        return slot_attention(module, *wide, scaling, softcap, s_aux)[0].to(query.dtype), None
    scoring = _Scoring(scaling, window_of(module), softcap, s_aux)
    attend = _prefill if attention_mask is None else _decode
    return attend(query, key, value, attention_mask, scoring), None


class _Scoring(NamedTuple):
    """How a layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does all of it."""
        return self.softcap is None and self.sinks is None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    rows, num_heads, num_tokens, head_dim = query.shape
    folded = num_heads != key.shape[1]
    if not scoring.is_plain or (scoring.window is not None and scoring.window < num_tokens):
        age = torch.arange(num_tokens, device=query.device).unsqueeze(1) - torch.arange(num_tokens, device=query.device)
        mask = (age >= 0) & (age < (scoring.window or num_tokens))
    if scoring.is_plain:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=folded
        )
        return out.transpose(1, 2)
    assert mask is not None
    by_head = query.reshape(rows, key.shape[1], -1, num_tokens, head_dim) * scoring.scale
    hidden = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    out = _attend(by_head, key.unsqueeze(2), value.unsqueeze(2), hidden, scoring)
    return out.reshape(rows, num_heads, num_tokens, value.shape[-1]).transpose(1, 2)


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: _Scoring
) -> torch.Tensor:
    assert mask is not None
    rows, num_heads, _, head_dim = query.shape
    folded = query.reshape(rows, key.shape[1], num_heads // key.shape[1], head_dim)
    mask = _windowed(mask, scoring.window)
    if query.device.type == "cuda" and scoring.is_plain:  # one kernel, with scores in float32
        mask = mask.expand(rows, 1, folded.shape[2], mask.shape[-1])
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scale)
        return out.reshape(rows, 1, num_heads, value.shape[-1])
    less = _less.get()  # on CPUs three products are faster than one kernel, and can be cut
    folded = folded * scoring.scale
    if less is None:
        return _attend(folded, key, value, mask, scoring).reshape(rows, 1, num_heads, value.shape[-1])
    num_far, reach = rows - less.shape[0], less.shape[-1]
    less = _windowed(less, scoring.window)
    far = _attend(folded[:num_far], key[:num_far], value[:num_far], mask[:num_far], scoring)
    near = _attend(folded[num_far:], key[num_far:, :, :reach], value[num_far:, :, :reach], less, scoring)
    return torch.cat((far, near)).reshape(rows, 1, num_heads, value.shape[-1])


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: _Scoring
) -> torch.Tensor:
    """Query, scaled already, is (rows, KV heads, ..., head dim) with as many heads to a KV head as it has places."""
    scores = torch.matmul(query, key.transpose(-2, -1))
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.add_(mask)
    if scoring.sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        by_head = scoring.sinks.float().view(1, key.shape[1], -1, *[1] * (scores.ndim - 3))
        nowhere = by_head.expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores.float(), nowhere), -1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _windowed(mask: torch.Tensor, window: int | None) -> torch.Tensor:
    """Hides what lies a window or more behind each row's token, the last that its mask lets through."""
    if window is None or window >= mask.shape[-1]:
        return mask
    index = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask == 0, index, -1).amax(-1, keepdim=True)
    return mask.masked_fill(index <= last - window, float("-inf"))
