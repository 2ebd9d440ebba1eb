"""Prefill: computes the keys and values of token sequences in slots, similar lengths together.

A sequence that a live slot begins with is copied from there, unless the request wants its own. With `exact`, sequences
are computed one at a time, padded to a multiple of `MIN_EXACT_ROWS`, so that none depends on another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.engines.cached_prefixes import token_key
from offbeat.engines.embedded.attention import KeyValueSlots
from offbeat.engines.protocol import EngineMetrics


class CachedPrompts:
    """Live slots by the token sequence that they begin with, so that equal prompts are prefilled once. The beginning of
    a live slot never changes."""

    def __init__(self) -> None:
        self._slots: dict[bytes, list[int]] = {}
        self._key: dict[int, bytes] = {}

    def find(self, tokens: np.ndarray) -> int | None:
        """A slot that starts with exactly these tokens and was filled for them."""
        slots = self._slots.get(token_key(tokens))
        return slots[0] if slots else None

    def add(self, slot: int, tokens: np.ndarray) -> None:
        self._remember(slot, token_key(tokens))

    def exchange(self, one: int, other: int) -> None:
        """Swaps two slots, either of which may be free."""
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
"""Most tokens, padding included, in one prefill: bounds its memory and the time that live slots wait for it."""
MIN_EXACT_ROWS = 16
"""Matrix products with fewer rows use other kernels, whose results depend on the number of rows and threads."""


@dataclass(frozen=True)
class Wanted:
    """Tokens whose keys and values a slot is to hold from its start on."""

    slot: int
    tokens: np.ndarray
    is_shared: bool
    """Whether they may be copied from another slot."""


class Prefill:
    """Fills slots. `use_threads` is called with the number of tokens before each forward pass."""

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
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if keeps_logits else {}

    def fill(self, wanted: Sequence[Wanted]) -> EngineMetrics:
        """Fills slots; returns how many tokens were computed and how many copied."""
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
        """Groups sequences of similar length; with `exact`, one at a time."""
        batches: list[list[Wanted]] = []
        for one in sorted(missing, key=lambda one: -len(one.tokens)):
            room = 1 if self.exact else max(1, PREFILL_TOKENS // len(batches[-1][0].tokens)) if batches else 0
            if not batches or len(batches[-1]) >= room:
                batches.append([])
            batches[-1].append(one)
        return batches

    def compute(self, batch: Sequence[Wanted]) -> int:
        """One forward pass; returns the number of its tokens, padding included."""
        longest = max(len(one.tokens) for one in batch)
        if self.exact:
            longest = round_up(longest, MIN_EXACT_ROWS)
        padded = np.zeros((len(batch), longest), np.int64)
        for row, one in enumerate(batch):
            padded[row, : len(one.tokens)] = one.tokens
        self._use_threads(padded.size)
        device = self.model.device
        self.kv.begin_prefill(torch.tensor([one.slot for one in batch], dtype=torch.int64, device=device))
        positions = torch.arange(longest, device=device).clamp_(max=self.max_context_tokens - 1)
        self.model(
            input_ids=torch.from_numpy(padded).to(device),
            position_ids=positions.expand(len(batch), longest),
            past_key_values=self.kv,
            use_cache=True,
            **self._options,
        )
        return int(padded.size)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
