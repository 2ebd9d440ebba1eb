"""Forgers are found within 300 submissions, and honest workers never: simulated token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.quarantine import (
    AUDIT_WINDOW,
    MAX_SUSPICION,
    MIN_PROVEN,
    OFF_GAP,
    Compared,
    is_believable,
    is_proven,
    looks_forged,
    suspicion,
)

STALE_SHARE = 0.3
"""`loss.audit_share` as it is by default."""
SUBMISSIONS = 300


class Engine:
    """Tokens of a model that is sure of two in five, and what an engine in bfloat16 says of their log-probs: up to 0.1
    off, and one in 300 further, up to 1."""

    def __init__(self, seed: int, noise: float = 0.03, rare: float = 1 / 300, length: tuple[int, int] = (20, 200)):
        self.rng, self.noise, self.rare, self.length = np.random.default_rng(seed), noise, rare, length

    def honest(self) -> tuple[np.ndarray, np.ndarray]:
        """True log-probs of a segment, and what is said of them."""
        rng, count = self.rng, int(self.rng.integers(*self.length))
        true = -rng.exponential(0.6, count) * (rng.random(count) < 0.6)
        gaps = rng.normal(0, self.noise, count) * (1 + 0.05 * rng.standard_t(3, count) ** 2)
        return true, true + np.where(rng.random(count) < self.rare, rng.uniform(0.3, 1, count), gaps)

    def forge(self, how: str, true: np.ndarray) -> np.ndarray:
        """What a forger says of the same tokens."""
        if how == "constant":
            return np.full_like(true, -0.1)  # the best guess for most of them
        if how == "another model":
            return true + self.rng.normal(0, 0.6, len(true)) * (true < 0)
        assert how == "replaced tokens"
        return true + self.rng.normal(10, 2, len(true))  # which the model holds next to impossible


def compared(true: np.ndarray, said: np.ndarray) -> Compared:
    return Compared(len(true), int((np.abs(true - said) > OFF_GAP).sum()))


def found_after(engine: Engine, how: str, where: str, share: float) -> int | None:
    """After how many submissions a forger of a fifth of its tokens is found, where a share of them is compared."""
    latest: list[Compared] = []
    for number in range(1, SUBMISSIONS + 1):
        true, said = engine.honest()
        if where == "whole answers":
            is_forged = np.full(len(true), engine.rng.random() < 0.2)
        else:
            is_forged = engine.rng.random(len(true)) < 0.2
        said = np.where(is_forged, engine.forge(how, true), said)
        if engine.rng.random() < share:
            latest = [*latest, compared(true, said)][-AUDIT_WINDOW:]
            if not is_believable(latest):
                return number
    return None


@pytest.mark.parametrize("share", [1.0, STALE_SHARE], ids=["of its version", "of the version before"])
@pytest.mark.parametrize("where", ["whole answers", "tokens everywhere"])
@pytest.mark.parametrize("how", ["constant", "another model", "replaced tokens"])
def test_a_forger_of_a_fifth_of_its_tokens_is_found_within_300_submissions(how: str, where: str, share: float):
    """Whoever claims the version before is compared less often: only where older tokens are looked at."""
    assert all(found_after(Engine(seed), how, where, share) is not None for seed in range(8))


@pytest.mark.parametrize("length", [(1, 3), (4, 12), (20, 200), (500, 2000)])
@pytest.mark.parametrize(("noise", "rare"), [(0.03, 1 / 300), (0.1, 1 / 200)])
def test_an_honest_worker_on_another_engine_is_never_suspect(length: tuple[int, int], noise: float, rare: float):
    engine = Engine(1, noise, rare, length)
    segments = [compared(*engine.honest()) for _ in range(2000 if length[0] < 500 else 300)]
    highest = max(suspicion(segments[: end + 1][-AUDIT_WINDOW:]) for end in range(0, len(segments), 16))
    assert highest < 0.7 * MAX_SUSPICION


def test_a_segment_that_is_off_throughout_is_nobodys_fault_and_four_in_a_row_are():
    """A flipped bit, a driver's hiccup."""
    fine, spoilt = [Compared(100, 0)] * 20, Compared(2000, 2000)
    assert is_believable([*fine, spoilt, spoilt, spoilt])
    assert not is_believable([*fine, spoilt, spoilt, spoilt, spoilt])
    assert is_believable(10 * [*fine, spoilt])


def test_a_long_honest_past_buys_no_credit():
    forged = [Compared(100, 20)] * 4
    assert not is_believable(forged)
    assert suspicion([*[Compared(100, 0)] * 100_000, *forged]) == suspicion(forged)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=30), st.integers(0, 29))
def test_one_more_token_that_is_off_never_makes_a_worker_more_believable(numbers, which):
    found = [Compared(num_tokens, min(num_tokens, num_off)) for num_tokens, num_off in numbers]
    worse = [c._replace(num_off=min(c.num_tokens, c.num_off + (i == which))) for i, c in enumerate(found)]
    assert suspicion(worse) >= suspicion(found)


def test_what_was_not_compared_says_nothing():
    assert suspicion([]) == 0
    assert suspicion([Compared(0, 0)] * 1000) == 0


def test_a_worker_is_proven_by_enough_honest_segments_and_doubted_again_with_the_first_that_is_off():
    honest = [Compared(24, 0)] * MIN_PROVEN
    assert not is_proven(honest[1:])
    assert is_proven(honest)
    assert not is_proven([*honest, Compared(24, 6)])
    assert is_proven([*honest, Compared(24, 6), *[Compared(24, 0)] * 40]), "a doubt passes"


@pytest.mark.parametrize("length", [(4, 12), (20, 200), (500, 2000)])
def test_hardly_an_honest_segment_looks_forged_and_one_that_is_forged_throughout_does(length: tuple[int, int]):
    engine = Engine(3, noise=0.1, rare=1 / 200, length=length)
    segments = [engine.honest() for _ in range(1000)]
    assert sum(looks_forged(*compared(*segment)) for segment in segments) <= 2
    for how in ("constant", "another model", "replaced tokens"):
        forged = [looks_forged(*compared(true, engine.forge(how, true))) for true, _ in segments]
        assert np.mean(forged) > (0.9 if length[0] >= 20 else 0.3)
