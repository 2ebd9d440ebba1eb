"""The KV of every slot, preallocated, behind the one method that a model's attention layers call.

Per layer there is one tensor for keys and one for values, of shape (slots, KV heads, context, head dim), made when the
layer first hands something over: so nothing here depends on an architecture. Transformers calls `update` where it
would call its own cache. On CPUs keys lie in memory with the context innermost, which makes the product of a few query
rows with them 1.8 times as fast; their shape is the same.

A forward pass is one of two kinds, chosen before it by `begin_prefill` or `begin_decode`:

- prefill: several rows from their first token on, padded on the right; the layer attends to what it just made;
- decode: one token for each of the first rows, written at the row's own position; the layer attends to the row's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class KeyValueSlots:
    """See the module. Slots are named by their index."""

    def __init__(
        self,
        num_slots: int,
        max_context_tokens: int,
        keys: Sequence[torch.Tensor] = (),
        values: Sequence[torch.Tensor] = (),
    ):
        self.num_slots, self.max_context_tokens = num_slots, max_context_tokens
        self.keys, self.values = list(keys), list(values)
        self._prefill_slots: torch.Tensor | None = None
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._read_tokens = 0

    def begin_prefill(self, slots: torch.Tensor) -> None:
        """The next forward pass fills these slots from their start."""
        self._prefill_slots = slots

    def begin_decode(self, positions: torch.Tensor, read_tokens: int) -> None:
        """The next forward pass adds a token at `positions` of the first slots and reads `read_tokens` of each."""
        self._prefill_slots = None
        self._positions, self._read_tokens = positions, read_tokens

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores what a layer made for its new tokens and returns all that it may attend to."""
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
        """Some models ask, to number tokens whose positions they were in fact given."""
        return 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Gives target slot i the first tokens of source slot i."""
        if not self.keys:
            return
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> None:
        assert layer_idx == len(self.keys), f"layer {layer_idx} came before layer {len(self.keys)}"
        # Zeros and not garbage: what is masked is still multiplied, and 0 times infinity would not be 0.
        for made, held in ((key, self.keys), (value, self.values)):
            slots, heads, context, head_dim = self.num_slots, made.shape[1], self.max_context_tokens, made.shape[3]
            if held is self.keys and made.device.type == "cpu":
                held.append(made.new_zeros((slots, heads, head_dim, context)).transpose(2, 3))
            else:
                held.append(made.new_zeros((slots, heads, context, head_dim)))
