"""Keys and values in slots, one slot for each running request, and the attention function that reads them.

Transformers calls this function by its registered name (`NAME`).

Transformers makes no mask for a custom attention function, so attention gets a mask only if the engine supplies it.
Without a mask, the pass is a prefill: rows are whole prompts padded on the right, and causality hides the padding. With
a mask (0 or -inf), the pass is a decode step: each row is one token that attends to its slot.

In a decode step the last rows may read a shorter context than the first rows (`short_context`). The two parts then
attend separately, each with its own mask. Query heads that share a KV head are folded into one dimension, so K and V
are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from offbeat.model.devices import is_slow
from offbeat.model.usage import Usage, usage, window_of

NAME = "offbeat_slots"

_short_mask: ContextVar[Tensor | None] = ContextVar("short_context", default=None)


@contextmanager
def short_context(mask: Tensor | None) -> Iterator[None]:
    """Tells attention, within the `with` block, that the last rows of a decode step need only a shorter context.

    A `mask` of shape (n, 1, 1, c) is for the last n rows, which need only the first c tokens of their slots. If `mask`
    is None, all rows read the same context. The mask travels in a context variable, because a model passes only one
    mask on to its attention.
    """
    token = _short_mask.set(mask)
    try:
        yield
    finally:
        _short_mask.reset(token)


def use_slot_attention(model: PreTrainedModel) -> Usage:
    """Replaces a model's attention with `slot_attention` if the model supports KV slots (`Usage.has_slots`); returns
    the model's `Usage`."""
    found = usage(model)
    if found.has_slots:
        AttentionInterface.register(NAME, slot_attention)
        model.set_attn_implementation(NAME)
    return found


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for transformers: a prefill if `attention_mask` is None, otherwise a decode step.

    `query` is (rows, heads, tokens, head dim); `key` and `value` are (rows, KV heads, read tokens, head dim). `softcap`
    bounds the scores; `s_aux` holds each head's attention-sink score.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_slow(query):
        wide = (query.float(), key.float(), value.float(), None if attention_mask is None else attention_mask.float())
        return slot_attention(module, *wide, scaling, softcap, s_aux)[0].to(query.dtype), None
    scoring = _Scoring(scaling, window_of(module), softcap, s_aux)
    attend = _prefill if attention_mask is None else _decode
    return attend(query, key, value, attention_mask, scoring), None


class _Scoring(NamedTuple):
    """Parameters of a layer's attention scores; None: the layer does not use the parameter."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention supports all these parameters."""
        return self.softcap is None and self.sinks is None


def _prefill(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: _Scoring) -> Tensor:
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


def _decode(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: _Scoring) -> Tensor:
    assert mask is not None
    rows, num_heads, _, head_dim = query.shape
    folded = query.reshape(rows, key.shape[1], num_heads // key.shape[1], head_dim)
    mask = _windowed(mask, scoring.window)
    if query.device.type == "cuda" and scoring.is_plain:  # one kernel, with scores in float32
        mask = mask.expand(rows, 1, folded.shape[2], mask.shape[-1])
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scale)
        return out.reshape(rows, 1, num_heads, value.shape[-1])
    short_mask = _short_mask.get()  # on CPUs three products are faster than one kernel, and can be split
    folded = folded * scoring.scale
    if short_mask is None:
        return _attend(folded, key, value, mask, scoring).reshape(rows, 1, num_heads, value.shape[-1])
    num_long, context = rows - short_mask.shape[0], short_mask.shape[-1]
    short_mask = _windowed(short_mask, scoring.window)
    long = _attend(folded[:num_long], key[:num_long], value[:num_long], mask[:num_long], scoring)
    short_keys, short_values = key[num_long:, :, :context], value[num_long:, :, :context]
    short = _attend(folded[num_long:], short_keys, short_values, short_mask, scoring)
    return torch.cat((long, short)).reshape(rows, 1, num_heads, value.shape[-1])


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: _Scoring) -> Tensor:
    """Computes attention by matrix products. `query` is already multiplied by the scale and has the shape (rows, KV
    heads, heads per KV head, ..., head dim)."""
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


def _windowed(mask: Tensor, window: int | None) -> Tensor:
    """Returns `mask` with each row limited to its last `window` visible tokens; without a limit if `window` is None."""
    if window is None or window >= mask.shape[-1]:
        return mask
    index = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask == 0, index, -1).amax(-1, keepdim=True)
    return mask.masked_fill(index <= last - window, float("-inf"))


class KeyValueSlots:
    """Preallocated keys and values of every slot; transformers uses it in place of its own cache and calls `update`.

    Each layer has one tensor for keys and one for values, of shape (slots, KV heads, context, head dim). They are
    allocated at the layer's first `update`, so nothing depends on the architecture. On CPUs the context is the
    innermost dimension of the keys in memory, which makes the product with a few query rows 1.8 times as fast.

    A forward pass is either a prefill or a decode step. In a prefill, each layer attends to the keys and values that it
    just computed. In a decode step, each of the first slots gets one token, which attends to its slot.

    If the tensors of all layers exist already, they are given as `keys` and `values`.
    """

    def __init__(
        self, num_slots: int, max_context_tokens: int, keys: Sequence[Tensor] = (), values: Sequence[Tensor] = ()
    ):
        self.num_slots, self.max_context_tokens = num_slots, max_context_tokens
        self.keys, self.values = list(keys), list(values)
        self._prefill_slots: Tensor | None = None
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._read_tokens = 0

    def begin_prefill(self, slots: Tensor) -> None:
        """Makes the next forward pass fill these slots from their start."""
        self._prefill_slots = slots

    def begin_decode(self, positions: Tensor, read_tokens: int) -> None:
        """Makes the next forward pass write at `positions` of the first slots and read `read_tokens` tokens of each."""
        self._prefill_slots = None
        self._positions, self._read_tokens = positions, read_tokens

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values; returns all keys and values that the layer attends to."""
        if layer_idx >= len(self.keys):
            self._allocate(key, value, layer_idx)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prefill_slots is not None:
            keys[self._prefill_slots, :, : key.shape[2]] = key
            values[self._prefill_slots, :, : value.shape[2]] = value
            return key, value
        num_rows, index = key.shape[0], self._positions[:, None, None, None]
        keys[:num_rows].scatter_(2, index.expand(key.shape), key)
        values[:num_rows].scatter_(2, index.expand(value.shape), value)
        return keys[:num_rows, :, : self._read_tokens], values[:num_rows, :, : self._read_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0. Some models call this, but its result has no effect because positions are always given."""
        return 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Copies the KV of the first `num_tokens` tokens from slot `sources[i]` to slot `targets[i]`, all i at once."""
        if not self.keys:
            return
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def _allocate(self, key: Tensor, value: Tensor, layer_idx: int) -> None:
        assert layer_idx == len(self.keys), f"layer {layer_idx} stored keys before layer {len(self.keys)}"
        # Zeros, because masked values are still multiplied by 0, and 0 times infinity or NaN is NaN.
        for made, held in ((key, self.keys), (value, self.values)):
            slots, heads, context, head_dim = self.num_slots, made.shape[1], self.max_context_tokens, made.shape[3]
            if held is self.keys and made.device.type == "cpu":
                held.append(_zeros(made, (slots, heads, head_dim, context)).transpose(2, 3))
            else:
                held.append(_zeros(made, (slots, heads, context, head_dim)))


ALIGNED_BYTES = 64
"""Alignment of torch's own tensors on a CPU; the rounding of a product may depend on it."""


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns zeros of the dtype and device of `like`. On a CPU their memory comes from the system page by page, when
    it is first written; so slots that no request ever uses cost neither time nor memory."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    memory = np.zeros(num_bytes + ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNED_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(like.dtype).view(shape)


MIN_SAVED_TOKENS = 4096
"""Smallest number of tokens that a decode step must save to read its rows in two parts instead of one; a second part
takes extra kernels in every layer."""


def num_long_rows(lengths: Sequence[int]) -> int:
    """Returns how many of the longest rows a decode step should read as a part of their own.

    Each row is read up to the length of the longest row in its part. The number is chosen so that the step reads the
    fewest tokens in total. If that saves fewer than `MIN_SAVED_TOKENS`, it is the number of all rows. Rows of equal
    length are never separated.

    Without a second part, a few long answers, continued from earlier versions, would make every new answer as expensive
    as themselves. All rows grow by one token per step, so the longer ones stay longer until new requests start."""
    longest_first = -np.sort(-np.asarray(lengths))
    num_others = len(lengths) - np.arange(len(lengths))
    saved = num_others * (longest_first[:1] - longest_first)
    best = int(saved.argmax()) if len(lengths) else 0
    return best if len(lengths) and saved[best] >= MIN_SAVED_TOKENS else len(lengths)


def exchanges(lengths: Sequence[int], num_long: int) -> list[tuple[int, int]]:
    """Returns the smallest set of swaps, as pairs of row indices, that brings the `num_long` longest rows to the
    front."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    long = set(order[:num_long])
    comes = [row for row in order[:num_long] if row >= num_long]
    goes = [row for row in range(num_long) if row not in long]
    return list(zip(comes, goes, strict=True))
