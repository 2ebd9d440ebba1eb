"""The KV of every slot, preallocated, behind the one method that a model's attention layers call.

Per layer there is one tensor for keys and one for values, of shape (slots, KV heads, context, head dim), made when the
layer first hands something over: so nothing here depends on an architecture. Transformers calls `update` where it
would call its own cache.

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

    def __init__(self, num_slots: int, max_context_tokens: int):
        self.num_slots, self.max_context_tokens = num_slots, max_context_tokens
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._prefill_slots: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._num_rows = self._read_tokens = 0
        self._row_index: dict[int, torch.Tensor] = {}

    def begin_prefill(self, slots: torch.Tensor) -> None:
        """The next forward pass fills these slots from their start."""
        self._prefill_slots = slots

    def begin_decode(self, positions: torch.Tensor, read_tokens: int) -> None:
        """The next forward pass adds a token at `positions` of the first slots and reads `read_tokens` of each."""
        self._prefill_slots = None
        self._positions, self._num_rows, self._read_tokens = positions, positions.shape[0], read_tokens
        self._row_index = {}

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
        self._write_token(keys, key)
        self._write_token(values, value)
        return keys[: self._num_rows, :, : self._read_tokens], values[: self._num_rows, :, : self._read_tokens]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask, to number tokens whose positions they were in fact given."""
        return 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Gives target slot i the first tokens of source slot i."""
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> None:
        assert layer_idx == len(self.keys), f"layer {layer_idx} came before layer {len(self.keys)}"
        for made, held in ((key, self.keys), (value, self.values)):
            shape = (self.num_slots, made.shape[1], self.max_context_tokens, made.shape[3])
            # Zeros and not garbage: what is masked is still multiplied, and 0 times infinity would not be 0.
            held.append(torch.zeros(shape, dtype=made.dtype, device=made.device))

    def _write_token(self, held: torch.Tensor, made: torch.Tensor) -> None:
        """One row copy for all slots and heads; its index is the same in every layer with as many heads."""
        num_heads, head_dim = held.shape[1], held.shape[3]
        index = self._row_index.get(num_heads)
        if index is None:
            assert self._positions is not None
            first = torch.arange(self._num_rows * num_heads, device=held.device) * self.max_context_tokens
            index = (first.view(self._num_rows, num_heads) + self._positions.unsqueeze(1)).view(-1)
            self._row_index[num_heads] = index
        held.view(-1, head_dim).index_copy_(0, index, made.reshape(-1, head_dim))
