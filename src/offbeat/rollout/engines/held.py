"""Remembers where the keys and values of cut requests lie, so that they can be carried on without prefill.

Only names are kept here, no keys and values: a place is whatever an engine calls the memory that a request has left and
nobody needs yet. So holding costs nothing, never takes memory from a running request, and ends, least recently cut
first, as places are wanted. Guarantees:

- what is found begins with the request's own tokens, cut into prompt and response where the request's are, because how
  a prefix was computed, to the bit, depends on that;
- it is of the very version that is served, or, where the request asks for stale ones, at most `kv_lag` versions older;
- a request that wants everything computed anew finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from offbeat.rollout.engine import KvMode, Request

FED_COST = 16
"""What a request has beyond a held prefix is fed a token a step: a row that reads the whole context, and a step of
waiting. Each costs as much as so many tokens of a prefill, which computes all at once: 6 to 32 were measured on a CPU,
with 64 to 900 tokens of context. (To copy a prefix, where slots move, costs a hundredth of computing it, or less.)"""


@dataclass(frozen=True, eq=False)
class Held:
    """A prefix of a request that was cut."""

    place: int
    tokens: np.ndarray
    """Those whose keys and values are there."""
    num_prompt: int
    """How many tokens the prompt has to which they belong."""
    kv_version: int
    """The oldest version among these keys and values."""
    kv_lag: int = 0
    """How many versions they may lag behind what is loaded meanwhile; with 0 the next load ends them."""

    def num_of_use(self, request: Request) -> int:
        """How many tokens a request can take from here: 0 unless these are its own. Its last token is always fed."""
        num_tokens = min(len(self.tokens), len(request.tokens) - 1)
        if len(request.tokens) - request.position != self.num_prompt:
            return 0
        return num_tokens if np.array_equal(self.tokens[:num_tokens], request.tokens[:num_tokens]) else 0


class HeldPrefixes:
    """See the module. One prefix a place."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        """Least recently cut first."""
        self._places: dict[bytes, set[int]] = {}
        """By prompt: few prefixes have the same."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, place: int) -> bool:
        return place in self._held

    def hold(self, held: Held) -> None:
        assert held.place not in self._held, f"place {held.place} already holds a prefix"
        assert len(held.tokens) >= held.num_prompt, f"place {held.place} does not hold a whole prompt"
        self._held[held.place] = held
        self._places.setdefault(_key(held.tokens, held.num_prompt), set()).add(held.place)

    def find(self, request: Request, version: int) -> Held | None:
        """The longest prefix that a request may use while `version` is served."""
        if request.kv is KvMode.REFILL or not request.position:
            return None
        oldest = version - (request.kv_lag if request.kv is KvMode.STALE else 0)
        places = self._places.get(_key(request.tokens, len(request.tokens) - request.position), ())
        usable = [held for held in map(self._held.__getitem__, places) if oldest <= held.kv_version <= version]
        best = max(usable, key=lambda held: (held.num_of_use(request), held.kv_version), default=None)
        return best if best is not None and best.num_of_use(request) else None

    def drop(self, place: int) -> None:
        """Whatever is held there is gone, or taken."""
        held = self._held.pop(place, None)
        if held is None:
            return
        key = _key(held.tokens, held.num_prompt)
        self._places[key].remove(place)
        if not self._places[key]:
            del self._places[key]

    def move(self, place: int, target: int) -> None:
        """What lay in a place lies elsewhere now; it keeps its turn."""
        assert target not in self._held, f"place {target} already holds a prefix"
        held = list(self._held.values())
        self._held = {h.place: h for h in (replace(h, place=target) if h.place == place else h for h in held)}
        moved = self._held[target]
        places = self._places[_key(moved.tokens, moved.num_prompt)]
        places.remove(place)
        places.add(target)

    def load(self, version: int) -> None:
        """Another version is served from now on: drops what lags too far behind it."""
        for held in list(self._held.values()):
            if not (held.kv_lag and 0 <= version - held.kv_version <= held.kv_lag):
                self.drop(held.place)

    def keep_newest(self, max_num: int) -> None:
        """Drops the longest held, until so many are left."""
        for place in list(self._held)[: max(0, len(self._held) - max_num)]:
            self.drop(place)

    def in_order_of_loss(self, places: Iterable[int]) -> list[int]:
        """Places to be written over, in the order in which that costs least: empty ones, then the longest held."""
        order = {place: number for number, place in enumerate(self._held, start=1)}
        return sorted(places, key=lambda place: (order.get(place, 0), place))

    def num_tokens(self, place: int) -> int:
        return len(self._held[place].tokens)


def is_cheaper(num_held: int, num_missing: int) -> bool:
    """Whether to take so many tokens from a held prefix and feed the missing ones, rather than prefill them all."""
    return num_missing * FED_COST <= num_held


def _key(tokens: np.ndarray, num_prompt: int) -> bytes:
    return tokens[:num_prompt].astype(np.int64, copy=False).tobytes()
