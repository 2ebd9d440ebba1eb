"""Makes the keys and values of token sequences in slots: once for each different sequence, like lengths together.

A sequence that a live slot begins with already is copied from there, unless its request wants its own. With `exact`
sequences are computed one at a time, in lengths that round up to `MIN_EXACT_ROWS`, so that none depends on another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.rollout.engine import EngineFigures
from offbeat.rollout.engines.embedded.prompts import HeldPrompts
from offbeat.rollout.engines.embedded.slots import KeyValueSlots

PREFILL_TOKENS = 4096
"""Most tokens, padding included, in one prefill: bounds its memory and how long live slots wait for it."""
MIN_EXACT_ROWS = 16
"""Matrix products with fewer rows take other paths: their results would depend on the rows' number and on threads."""


@dataclass(frozen=True)
class Wanted:
    """A slot, and the tokens whose keys and values it is to hold from its start on."""

    slot: int
    tokens: np.ndarray
    is_shared: bool
    """Whether another slot's will do."""


class Prefill:
    """See the module. `use_threads` is told the number of tokens before each forward pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KeyValueSlots,
        max_context_tokens: int,
        exact: bool,
        use_threads: Callable[[int], None],
    ):
        self.model, self.kv, self.max_context_tokens, self.exact = model, kv, max_context_tokens, exact
        self.prompts = HeldPrompts()
        self._use_threads = use_threads
        keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if keeps_logits else {}

    def fill(self, wanted: Sequence[Wanted]) -> EngineFigures:
        """Fills slots, and tells what of it was computed and what was there."""
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
            self.prompts.hold(one.slot, one.tokens)
        num_computed = sum(self.compute(batch) for batch in self._batches(missing))
        if copies:
            longest = max(len(one.tokens) for _, one in copies)
            self.kv.copy([source for source, _ in copies], [one.slot for _, one in copies], longest)
        num_copied = sum(len(one.tokens) for _, one in copies)
        return EngineFigures(num_prefilled_tokens=num_computed, num_resumed_tokens=num_copied)

    def _batches(self, missing: list[Wanted]) -> list[list[Wanted]]:
        """Sequences of like length together; with `exact`, one at a time."""
        batches: list[list[Wanted]] = []
        for one in sorted(missing, key=lambda one: -len(one.tokens)):
            room = 1 if self.exact else max(1, PREFILL_TOKENS // len(batches[-1][0].tokens)) if batches else 0
            if not batches or len(batches[-1]) >= room:
                batches.append([])
            batches[-1].append(one)
        return batches

    def compute(self, batch: Sequence[Wanted]) -> int:
        """One forward pass; returns how many tokens went through it, padding included."""
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
