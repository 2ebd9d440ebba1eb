"""Remembers which slots hold the KV of which token sequence, so that equal prompts are prefilled once.

Only live slots are remembered: what they hold from their first token on never changes while they live.
"""

from __future__ import annotations

import numpy as np


class HeldPrompts:
    def __init__(self) -> None:
        self._slots: dict[bytes, list[int]] = {}
        self._key: dict[int, bytes] = {}

    def find(self, tokens: np.ndarray) -> int | None:
        """A slot that starts with exactly these tokens and was filled for them."""
        slots = self._slots.get(_key(tokens))
        return slots[0] if slots else None

    def hold(self, slot: int, tokens: np.ndarray) -> None:
        self._remember(slot, _key(tokens))

    def move(self, source: int, target: int) -> None:
        key = self._key.get(source)
        self.drop(source)
        if key is not None:
            self._remember(target, key)

    def exchange(self, one: int, other: int) -> None:
        """Two live slots change places."""
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


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64, copy=False).tobytes()
