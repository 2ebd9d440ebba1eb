"""Index of the keys and values that aborted requests left in free slots, so that they can resume without prefill.

A free slot keeps its content until another request needs it, least recently aborted first, so caching takes no memory
from running requests. Guarantees:

- A prefix found for a request consists of the request's own tokens, with the same split into prompt and response, on
  which the bits of its keys and values depend.
- It is of the version served, or at most `kv_lag` versions older if the request allows stale keys and values.
- A request with `KvMode.REFILL` finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from offbeat.engines.protocol import KvMode, Request

FED_COST = 16
"""Cost of feeding one token beyond a cached prefix in a decode step, in prefill tokens: such a step reads the whole
context. 6 to 32 were measured on a CPU with 64 to 900 tokens of context. Copying a prefix between slots costs a
hundredth of computing it, or less."""


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """Prefix of an aborted request, in a free slot."""

    slot: int
    tokens: np.ndarray
    """Tokens whose keys and values are in the slot."""
    num_prompt: int
    """Length of the request's prompt."""
    kv_version: int
    """Oldest version among the keys and values."""
    kv_lag: int = 0
    """Versions that they may lag behind the one served; with 0 the next load drops them."""

    @property
    def key(self) -> bytes:
        return token_key(self.tokens[: self.num_prompt])

    def num_usable(self, request: Request) -> int:
        """Tokens that a request can reuse; 0 unless they are its own. Its last token is always fed."""
        num_tokens = min(len(self.tokens), len(request.tokens) - 1)
        if len(request.tokens) - request.position != self.num_prompt:
            return 0
        return num_tokens if np.array_equal(self.tokens[:num_tokens], request.tokens[:num_tokens]) else 0


class CachedPrefixes:
    """Cached prefixes, one per slot."""

    def __init__(self) -> None:
        self._prefixes: dict[int, CachedPrefix] = {}
        """By slot, least recently aborted first."""
        self._slots: dict[bytes, set[int]] = {}
        """By prompt; few prefixes share one."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, slot: int) -> bool:
        return slot in self._prefixes

    def add(self, prefix: CachedPrefix) -> None:
        assert prefix.slot not in self._prefixes, f"slot {prefix.slot} already holds a prefix"
        assert len(prefix.tokens) >= prefix.num_prompt, f"slot {prefix.slot} does not hold a whole prompt"
        self._prefixes[prefix.slot] = prefix
        self._slots.setdefault(prefix.key, set()).add(prefix.slot)

    def find(self, request: Request, version: int) -> CachedPrefix | None:
        """Longest prefix that a request may reuse while `version` is served."""
        if request.kv is KvMode.REFILL or not request.position:
            return None
        oldest = version - (request.kv_lag if request.kv is KvMode.STALE else 0)
        slots = self._slots.get(token_key(request.tokens[: len(request.tokens) - request.position]), ())
        usable = [prefix for prefix in map(self._prefixes.__getitem__, slots) if oldest <= prefix.kv_version <= version]
        best = max(usable, key=lambda prefix: (prefix.num_usable(request), prefix.kv_version), default=None)
        return best if best is not None and best.num_usable(request) else None

    def drop(self, slot: int) -> None:
        """Removes the slot's prefix, if any."""
        prefix = self._prefixes.pop(slot, None)
        if prefix is None:
            return
        key = prefix.key
        self._slots[key].remove(slot)
        if not self._slots[key]:
            del self._slots[key]

    def move(self, slot: int, target: int) -> None:
        """Renames a prefix's slot; its turn for eviction stays."""
        assert target not in self._prefixes, f"slot {target} already holds a prefix"
        prefixes = [replace(p, slot=target) if p.slot == slot else p for p in self._prefixes.values()]
        self._prefixes = {prefix.slot: prefix for prefix in prefixes}
        slots = self._slots[self._prefixes[target].key]
        slots.remove(slot)
        slots.add(target)

    def load(self, version: int) -> None:
        """Drops the prefixes that lag too far behind a newly loaded version."""
        for prefix in list(self._prefixes.values()):
            if not (prefix.kv_lag and 0 <= version - prefix.kv_version <= prefix.kv_lag):
                self.drop(prefix.slot)

    def keep_newest(self, max_num: int) -> None:
        """Drops the oldest prefixes until `max_num` are left."""
        for slot in list(self._prefixes)[: max(0, len(self._prefixes) - max_num)]:
            self.drop(slot)

    def eviction_order(self, slots: Iterable[int]) -> list[int]:
        """Slots in the order in which to overwrite them: empty ones, then the least recently aborted."""
        order = {slot: number for number, slot in enumerate(self._prefixes, start=1)}
        return sorted(slots, key=lambda slot: (order.get(slot, 0), slot))

    def num_tokens(self, slot: int) -> int:
        return len(self._prefixes[slot].tokens)


def is_worth_reusing(num_cached: int, num_missing: int) -> bool:
    """Whether reusing `num_cached` tokens and feeding the missing ones costs less than a prefill of all."""
    return num_missing * FED_COST <= num_cached


def token_key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64, copy=False).tobytes()
