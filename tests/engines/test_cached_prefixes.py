"""What is remembered of cut requests: no more than there is room for, no wrong prefix, no other version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from offbeat.engines.cached_prefixes import FED_COST, CachedPrefix, CachedPrefixes, is_worth_reusing
from offbeat.engines.protocol import KvMode, Request
from offbeat.trajectory import Sampling

NUM_SLOTS = 4
TEXTS = st.lists(st.integers(0, 1), min_size=2, max_size=7).map(np.array)
"""Of two tokens, so that prefixes often agree and often nearly do."""


def asking(tokens, num_prompt: int, kv: KvMode = KvMode.SAME, kv_lag: int = 0) -> Request:
    return Request("r", np.asarray(tokens), 0, Sampling(max_new_tokens=9), len(tokens) - num_prompt, kv, kv_lag)


def holding(*helds: CachedPrefix) -> CachedPrefixes:
    prefixes = CachedPrefixes()
    for held in helds:
        prefixes.add(held)
    return prefixes


class Slots(RuleBasedStateMachine):
    """Requests are cut, carried on, moved and written over while versions come and go; a plain list knows the truth."""

    @initialize()
    def start(self) -> None:
        self.prefixes, self.version = CachedPrefixes(), 3
        self.truth: list[CachedPrefix] = []
        """Least recently cut first."""

    def at(self, slot: int) -> CachedPrefix | None:
        return next((held for held in self.truth if held.slot == slot), None)

    @rule(slot=st.integers(0, NUM_SLOTS - 1), tokens=TEXTS, data=st.data())
    def cut(self, slot: int, tokens: np.ndarray, data: st.DataObject) -> None:
        self.write_over(slot)
        num_prompt = data.draw(st.integers(1, len(tokens)))
        kv_lag = data.draw(st.integers(0, 2))
        held = CachedPrefix(slot, tokens, num_prompt, self.version - data.draw(st.integers(0, kv_lag)), kv_lag)
        self.prefixes.add(held)
        self.truth.append(held)

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def write_over(self, slot: int) -> None:
        self.prefixes.drop(slot)
        self.truth = [held for held in self.truth if held.slot != slot]

    @rule(slot=st.integers(0, NUM_SLOTS - 1), to=st.integers(0, NUM_SLOTS - 1))
    def move(self, slot: int, to: int) -> None:
        if self.at(slot) and not self.at(to):
            self.prefixes.move(slot, to)
            self.truth = [replace(held, slot=to) if held.slot == slot else held for held in self.truth]

    @rule(step=st.integers(-1, 2))
    def load(self, step: int) -> None:
        self.version += step
        self.prefixes.load(self.version)
        self.truth = [h for h in self.truth if h.kv_lag and 0 <= self.version - h.kv_version <= h.kv_lag]

    @rule(max_num=st.integers(0, NUM_SLOTS))
    def need_room(self, max_num: int) -> None:
        self.prefixes.keep_newest(max_num)
        self.truth = self.truth[len(self.truth) - max_num :] if max_num < len(self.truth) else self.truth

    @rule(tokens=TEXTS, data=st.data(), kv=st.sampled_from(KvMode), kv_lag=st.integers(0, 2))
    def ask(self, tokens: np.ndarray, data: st.DataObject, kv: KvMode, kv_lag: int) -> None:
        request = asking(tokens, data.draw(st.integers(1, len(tokens))), kv, kv_lag)
        found = self.prefixes.find(request, self.version)
        lags = {KvMode.SAME: [0], KvMode.STALE: list(range(kv_lag + 1)), KvMode.REFILL: []}[kv]
        uses = [
            min(len(held.tokens), len(tokens) - 1)
            for held in self.truth
            if request.position
            and self.version - held.kv_version in lags
            and held.num_prompt == len(tokens) - request.position
            and all(mine == its for mine, its in zip(held.tokens, tokens[:-1], strict=False))
        ]
        if found is None:
            assert not uses
        else:
            assert self.at(found.slot) is not None
            num_usable = found.num_usable(request)
            assert num_usable == max(uses)
            assert found.tokens[:num_usable].tolist() == tokens[:num_usable].tolist()

    @invariant()
    def knows_as_many_as_there_are(self) -> None:
        assert len(self.prefixes) == len(self.truth) <= NUM_SLOTS
        held = [held.slot for held in self.truth]
        assert [slot in self.prefixes for slot in held] == [True] * len(held)
        empty = [slot for slot in range(NUM_SLOTS) if slot not in held]
        assert self.prefixes.eviction_order(range(NUM_SLOTS)) == [*empty, *held]


Slots.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestPlaces = Slots.TestCase


@pytest.mark.parametrize(
    "request_, num_usable",
    [
        (asking([1, 2, 3, 4, 5], 2), 4),
        (asking([1, 2, 3, 4, 9, 9], 2), 4),
        (asking([1, 2, 3, 4], 2), 3),
        (asking([1, 2, 3, 9, 5], 2), 0),
        (asking([1, 2, 3, 4, 5], 3), 0),
    ],
    ids=["goes on", "has more", "has less", "went elsewhere", "has another prompt"],
)
def test_a_request_takes_what_is_its_own_and_feeds_its_last_token(request_, num_usable):
    held = CachedPrefix(0, np.array([1, 2, 3, 4]), 2, kv_version=7)
    assert held.num_usable(request_) == num_usable
    assert holding(held).find(request_, 7) is (held if num_usable else None)


def test_a_new_request_takes_nothing_of_a_cut_one():
    assert holding(CachedPrefix(0, np.array([1, 2, 3]), 2, kv_version=7)).find(asking([1, 2], 2), 7) is None


def test_the_longest_of_several_prefixes_is_taken():
    short, long = CachedPrefix(0, np.array([1, 2]), 1, 7), CachedPrefix(1, np.array([1, 2, 3]), 1, 7)
    assert holding(short, long).find(asking([1, 2, 3, 4], 1), 7) is long


def test_another_version_is_used_by_those_alone_who_asked_for_it():
    held = CachedPrefix(0, np.array([1, 2, 3]), 1, kv_version=5, kv_lag=9)
    same, stale = asking([1, 2, 3, 4], 1), asking([1, 2, 3, 4], 1, KvMode.STALE, kv_lag=1)
    assert [holding(held).find(same, version) for version in (4, 5, 6)] == [None, held, None]
    assert [holding(held).find(stale, version) for version in (4, 5, 6, 7)] == [None, held, held, None]


def test_many_missing_tokens_are_computed_with_all_the_others_and_few_are_fed():
    assert is_worth_reusing(num_cached=1, num_missing=0)
    assert is_worth_reusing(num_cached=5 * FED_COST, num_missing=5)
    assert not is_worth_reusing(num_cached=5 * FED_COST - 1, num_missing=5)
