"""Index of keys and values that aborted requests left in the KV cache, so that a request can resume without prefill.

A free slot keeps its content until another request needs the slot, so caching takes no memory from running requests. A
prefix is reused only by a request that begins with the same tokens and has the same prompt length. (Where the prompt
ends affects the bits of the keys and values.) The prefix's keys and values are of the version served, or at most
`kv_lag` versions older if the request allows stale ones. A request with `KvMode.REFILL` finds no prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from offbeat.engines.protocol import KvMode, Request

FED_COST = 16
"""Cost of feeding one token in a decode step, which reads the whole context, relative to one token of a prefill.
Measured on a CPU: 6 to 32, with 64 to 900 tokens of context. Copying a prefix between slots costs at most a hundredth
of computing it."""


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """Tokens of an aborted request whose keys and values are still in a free slot."""

    slot: int
    tokens: np.ndarray
    """Tokens whose keys and values are in the slot."""
    num_prompt: int
    """Number of tokens in the aborted request's prompt."""
    kv_version: int
    """Number of the oldest version of the weights that computed any of the keys and values."""
    kv_lag: int = 0
    """Largest number of versions by which the keys and values may be older than the loaded weights; if 0, the next load
    drops the prefix."""

    @property
    def key(self) -> bytes:
        return token_key(self.tokens[: self.num_prompt])

    def num_usable(self, request: Request) -> int:
        """Returns how many cached tokens a request can reuse; 0 if the length of its prompt or any token differs. The
        request's last token is never reused: a decode step always feeds it to the model."""
        num_tokens = min(len(self.tokens), len(request.tokens) - 1)
        if len(request.tokens) - request.position != self.num_prompt:
            return 0
        return num_tokens if np.array_equal(self.tokens[:num_tokens], request.tokens[:num_tokens]) else 0


class CachedPrefixes:
    """Index of the prefixes cached in free slots, at most one per slot. It holds no keys and values itself; the caller
    moves those."""

    def __init__(self) -> None:
        self._prefixes: dict[int, CachedPrefix] = {}
        """Prefixes by slot, least recently aborted first."""
        self._slots: dict[bytes, set[int]] = {}
        """Slots that hold a prefix, by the key of the prefix's prompt; few prefixes share a prompt."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, slot: int) -> bool:
        return slot in self._prefixes

    def add(self, prefix: CachedPrefix) -> None:
        assert prefix.slot not in self._prefixes, f"slot {prefix.slot} already holds a prefix"
        assert len(prefix.tokens) >= prefix.num_prompt, f"slot {prefix.slot} holds only part of a prompt"
        self._prefixes[prefix.slot] = prefix
        self._slots.setdefault(prefix.key, set()).add(prefix.slot)

    def find(self, request: Request, version: int) -> CachedPrefix | None:
        """Returns the longest prefix that a request may reuse while `version` is served; None if there is none."""
        if request.kv is KvMode.REFILL or not request.position:
            return None
        oldest = version - (request.kv_lag if request.kv is KvMode.STALE else 0)
        slots = self._slots.get(token_key(request.tokens[: len(request.tokens) - request.position]), ())
        usable = [prefix for prefix in map(self._prefixes.__getitem__, slots) if oldest <= prefix.kv_version <= version]
        best = max(usable, key=lambda prefix: (prefix.num_usable(request), prefix.kv_version), default=None)
        return best if best is not None and best.num_usable(request) else None

    def drop(self, slot: int) -> None:
        """Removes the slot's prefix, if it has one."""
        prefix = self._prefixes.pop(slot, None)
        if prefix is None:
            return
        key = prefix.key
        self._slots[key].remove(slot)
        if not self._slots[key]:
            del self._slots[key]

    def move(self, slot: int, target: int) -> None:
        """Records that the caller moved a prefix from `slot` to `target`; its place in the eviction order stays."""
        assert target not in self._prefixes, f"slot {target} already holds a prefix"
        prefixes = [replace(p, slot=target) if p.slot == slot else p for p in self._prefixes.values()]
        self._prefixes = {prefix.slot: prefix for prefix in prefixes}
        slots = self._slots[self._prefixes[target].key]
        slots.remove(slot)
        slots.add(target)

    def load(self, version: int) -> None:
        """After the load of `version`, drops all prefixes but those whose keys and values are at most their `kv_lag`
        versions older; with a `kv_lag` of 0 a prefix is always dropped."""
        for prefix in list(self._prefixes.values()):
            if not (prefix.kv_lag and 0 <= version - prefix.kv_version <= prefix.kv_lag):
                self.drop(prefix.slot)

    def keep_newest(self, max_num: int) -> None:
        """Drops the least recently aborted prefixes until at most `max_num` are left."""
        for slot in list(self._prefixes)[: max(0, len(self._prefixes) - max_num)]:
            self.drop(slot)

    def eviction_order(self, slots: Iterable[int]) -> list[int]:
        """Returns `slots` in the order to overwrite them: slots without a prefix, then least recently aborted first."""
        order = {slot: number for number, slot in enumerate(self._prefixes, start=1)}
        return sorted(slots, key=lambda slot: (order.get(slot, 0), slot))

    def num_tokens(self, slot: int) -> int:
        return len(self._prefixes[slot].tokens)


def is_worth_reusing(num_cached: int, num_missing: int) -> bool:
    """Whether a cached prefix is cheaper than a new prefill: `num_cached` tokens are reused, and the `num_missing`
    tokens after them are fed one by one in decode steps."""
    return num_missing * FED_COST <= num_cached


def token_key(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int64, copy=False).tobytes()
