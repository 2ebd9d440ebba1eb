"""How micro-batches are divided among ranks: the same number of rounds for all, each micro-batch once, one order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.rounds import balance, by_cost, cost, turns

COSTS = st.lists(st.integers(1, 50), max_size=40)
RANKS = st.integers(1, 5)


@given(COSTS, RANKS)
def test_all_ranks_make_the_same_number_of_passes_and_take_each_micro_batch_once(costs, size):
    order = by_cost(costs)
    own = [list(turns(order, rank, size)) for rank in range(size)]
    assert len({len(each) for each in own}) == 1
    taken = [turn.index for each in own for turn in each if turn.index is not None]
    assert sorted(taken) == list(range(len(costs)))


@given(COSTS, RANKS)
def test_the_order_of_places_does_not_depend_on_the_number_of_ranks(costs, size):
    order = by_cost(costs)
    placed = {t.place: t.index for rank in range(size) for t in turns(order, rank, size) if t.index is not None}
    assert [placed[place] for place in sorted(placed)] == order
    assert sorted(placed) == list(range(len(costs)))


@given(COSTS, RANKS)
def test_only_the_last_ranks_of_the_last_round_run_along(costs, size):
    for rank in range(size):
        rounds = list(turns(by_cost(costs), rank, size))
        assert all(turn.num_real == size for turn in rounds[:-1])
        assert all((turn.index is None) == (rank >= turn.num_real) for turn in rounds)


def test_one_sample_on_four_ranks_makes_one_round():
    (first,), *others = [list(turns([0], rank, 4)) for rank in range(4)]
    assert (first.index, first.num_real) == (0, 1)
    assert all(turn.index is None and turn.num_real == 1 for (turn,) in others)


def test_long_tails_of_a_7b_model_leave_eight_ranks_busy():
    """512 answers, log-normal with a median of 3,670 tokens and a longest of 27,648, in rows of 16,384 tokens."""
    shares, plain = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(np.log(3670), 0.8, 512).astype(int), 27648)
        rows, room = [], 0
        for length in lengths:
            if not rows or length > room:
                rows.append([])
                room = 16384
            rows[-1].append(int(length))
            room -= int(length)
        costs = [cost(sum(row), row, 3584) for row in rows]
        shares.append(balance(costs, 8))
        plain.append(sum(costs) / (8 * sum(max(costs[i : i + 8]) for i in range(0, len(costs), 8))))
    assert np.mean(shares) >= 0.93
    assert np.mean(plain) < np.mean(shares)


def test_the_most_expensive_come_first_and_equal_ones_keep_their_order():
    assert by_cost([3, 9, 3, 12]) == [3, 1, 0, 2]
    assert balance([1, 4, 1, 4], 2) == 1.0, "in the order given, each round would wait for a long one"
