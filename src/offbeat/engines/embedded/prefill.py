"""Prefill: computes the keys and values of token sequences in slots, batching sequences of similar length.

If a live slot already begins with the same sequence, its keys and values are copied, except for a request with
`KvMode.REFILL`. With `exact`, sequences are computed one at a time, padded to a multiple of `MIN_EXACT_ROWS`. So the
result for one sequence does not depend on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.engines.cached_prefixes import token_key
from offbeat.engines.embedded.attention import KeyValueSlots
from offbeat.engines.embedded.graphs import Graphs, padded_rows, padded_tokens
from offbeat.engines.protocol import EngineMetrics


class CachedPrompts:
    """Finds live slots (slots of running requests) by the tokens that they were prefilled with, so that equal prompts
    are computed once. The prefilled tokens of a live slot never change."""

    def __init__(self) -> None:
        self._slots: dict[bytes, list[int]] = {}
        self._key: dict[int, bytes] = {}

    def find(self, tokens: np.ndarray) -> int | None:
        """Returns a slot that was prefilled with exactly these tokens; None if there is none."""
        slots = self._slots.get(token_key(tokens))
        return slots[0] if slots else None

    def add(self, slot: int, tokens: np.ndarray) -> None:
        self._remember(slot, token_key(tokens))

    def exchange(self, one: int, other: int) -> None:
        """Swaps the entries of two slots, either of which may be free."""
        keys = {other: self._key.get(one), one: self._key.get(other)}
        self.drop(one)
        self.drop(other)
        for slot, key in keys.items():
            if key is not None:
                self._remember(slot, key)

    def drop(self, slot: int) -> None:
        key = self._key.pop(slot, None)
        if key is not None:
            self._slots[key].remove(slot)
            if not self._slots[key]:
                del self._slots[key]

    def clear(self) -> None:
        self._slots.clear()
        self._key.clear()

    def _remember(self, slot: int, key: bytes) -> None:
        assert slot not in self._key, f"slot {slot} already holds a prompt"
        self._key[slot] = key
        self._slots.setdefault(key, []).append(slot)


PREFILL_TOKENS = 4096
"""Largest number of tokens, padding included, in a batch of several sequences; a longer sequence is computed by itself.
Bounds the memory of a batch and the time that live slots wait."""
MIN_EXACT_ROWS = 16
"""Multiple to which `exact` pads a sequence: matrix products with fewer rows use other kernels, whose results depend on
the number of rows and threads."""


@dataclass(frozen=True)
class Wanted:
    """A slot to fill, and the tokens whose keys and values must be at the start of the slot."""

    slot: int
    tokens: np.ndarray
    is_shared: bool
    """Whether the keys and values may be copied from another slot."""


class Prefill:
    """Fills slots with keys and values. Before each forward pass it calls `use_threads` with the pass's number of
    tokens, so that the caller can choose the number of threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KeyValueSlots,
        max_context_tokens: int,
        exact: bool,
        use_threads: Callable[[int], None],
    ):
        self.model, self.kv, self.max_context_tokens, self.exact = model, kv, max_context_tokens, exact
        self.prompts = CachedPrompts()
        self._use_threads = use_threads
        self.graphs: Graphs | None = None
        """If set, runs forward passes as CUDA graphs, with their sizes rounded up."""
        self._inputs: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """Tokens and slots that the graphs read, by the shape of the tokens."""
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if keeps_logits else {}

    def fill(self, wanted: Sequence[Wanted]) -> EngineMetrics:
        """Fills slots; returns the numbers of tokens computed (prefilled) and copied from other slots (resumed)."""
        missing: list[Wanted] = []
        copies: list[tuple[int, Wanted]] = []
        for one in wanted:
            if len(one.tokens) == 0:
                continue
            source = self.prompts.find(one.tokens) if one.is_shared else None
            if source is None:
                missing.append(one)
            else:
                copies.append((source, one))
            self.prompts.add(one.slot, one.tokens)
        num_computed = sum(self.compute(batch) for batch in self._batches(missing))
        if copies:
            longest = max(len(one.tokens) for _, one in copies)
            self.kv.copy([source for source, _ in copies], [one.slot for _, one in copies], longest)
        num_copied = sum(len(one.tokens) for _, one in copies)
        return EngineMetrics(num_prefilled_tokens=num_computed, num_resumed_tokens=num_copied)

    def _batches(self, missing: list[Wanted]) -> list[list[Wanted]]:
        """Splits sequences into batches of similar length; with `exact`, of one sequence each."""
        batches: list[list[Wanted]] = []
        for one in sorted(missing, key=lambda one: -len(one.tokens)):
            room = 1 if self.exact else max(1, PREFILL_TOKENS // len(batches[-1][0].tokens)) if batches else 0
            if not batches or len(batches[-1]) >= room:
                batches.append([])
            batches[-1].append(one)
        return batches

    def compute(self, batch: Sequence[Wanted]) -> int:
        """Computes a batch's keys and values in one forward pass; returns the number of tokens, padding included."""
        num_rows, longest = len(batch), max(len(one.tokens) for one in batch)
        if self.exact:
            longest = round_up(longest, MIN_EXACT_ROWS)
        if self.graphs is not None:
            num_rows, longest = padded_rows(num_rows), padded_tokens(longest, self.kv.max_context_tokens)
        padded, slots = np.zeros((num_rows, longest), np.int64), np.zeros(num_rows, np.int64)
        for row in range(num_rows):
            one = batch[row if row < len(batch) else 0]  # writes the same keys and values once more
            padded[row, : len(one.tokens)], slots[row] = one.tokens, one.slot
        self._use_threads(padded.size)
        if self.graphs is None:
            device = self.model.device
            self._forward(torch.from_numpy(padded).to(device), torch.from_numpy(slots).to(device))
        else:
            self._replay(self.graphs, padded, slots)
        return int(padded.size)

    def _forward(self, tokens: Tensor, slots: Tensor) -> None:
        num_rows, longest = tokens.shape
        positions = torch.arange(longest, device=tokens.device).clamp_(max=self.max_context_tokens - 1)
        self.kv.begin_prefill(slots)
        self.model(
            input_ids=tokens,
            position_ids=positions.expand(num_rows, longest),
            past_key_values=self.kv,
            use_cache=True,
            **self._options,
        )

    def _replay(self, graphs: Graphs, tokens: np.ndarray, slots: np.ndarray) -> None:
        """Computes a batch by a graph. A graph always reads the same memory, so tokens and slots are copied to the
        tensors that the first batch of this shape used."""
        if tokens.shape not in self._inputs:
            device = self.model.device
            self._inputs[tokens.shape] = (torch.from_numpy(tokens).to(device), torch.from_numpy(slots).to(device))
        own_tokens, own_slots = self._inputs[tokens.shape]
        own_tokens.copy_(torch.from_numpy(tokens))
        own_slots.copy_(torch.from_numpy(slots))
        graphs.run(("prefill", *tokens.shape), lambda: self._forward(own_tokens, own_slots))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
