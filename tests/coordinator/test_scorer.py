"""What a scorer makes of the parts of a reward, and of weights that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from offbeat.coordinator.reward_queue import Scorer
from offbeat.ledger.records import Purpose, Unscored
from offbeat.rewards.pool import FailureWatch, RewardResult, Shaping
from offbeat.trajectory import End, Reward

SHAPING = Shaping({"right": 2.0, "brief": 0.5}, max_new_tokens=4, overlong_tokens=2)
RIGHT = RewardResult(1.0, rewards=(Reward(1.0, "right"),))


def scorer(**more) -> Scorer:
    return Scorer(lambda tokens: [""] * len(tokens), FailureWatch(1.0, window=64), Path("rewards.log"), SHAPING, **more)


def sample(purpose: Purpose) -> Unscored:
    return Unscored(1, 0, purpose, {}, "own", np.array([1, 2, 3]), End.STOP, 1)


def test_training_and_evaluation_share_weights_and_only_training_has_the_penalty():
    (trained,) = scorer().scored([sample(Purpose.TRAIN)], [RIGHT])
    (evaluated,) = scorer().scored([sample(Purpose.EVAL)], [RIGHT])
    assert evaluated.rewards == (Reward(1.0, "right", weight=2.0),)
    assert trained.rewards == (*evaluated.rewards, Reward(-0.5, "overlong"))


def test_a_weight_that_no_reward_has_used_is_told_once_and_not_before_one_came():
    made = scorer(untried=SHAPING.weights)
    assert made.take_unseen() == []
    made.scored([sample(Purpose.TRAIN)], [RewardResult(error="raised: no egg")])
    assert made.take_unseen() == []
    made.scored([sample(Purpose.TRAIN)], [RIGHT])
    assert made.take_unseen() == ["brief"]
    assert made.take_unseen() == []


def test_weights_that_were_tried_before_training_are_not_told_again():
    made = scorer()
    made.scored([sample(Purpose.TRAIN)], [RIGHT])
    assert made.take_unseen() == []


def test_parts_that_come_to_too_much_by_their_weights_are_a_failure_of_the_reward():
    """An advantage of such a reward would be 0 for all the others of its group, without a word."""
    made = scorer()
    parts = RewardResult(9e5, rewards=(Reward(9e5, "right"),))
    for purpose, earned in {Purpose.TRAIN: 1799999.5, Purpose.EVAL: 1800000.0}.items():
        (found,) = made.scored([sample(purpose)], [parts])
        assert found.rewards is None
        assert found.error == f"value: the weighted sum is {earned}; it must be -1e+06 to 1e+06"
    assert (made.num_failed, made.watch.num_failed) == (2, 2)


def test_a_reward_of_the_largest_size_is_one():
    (found,) = scorer().scored([sample(Purpose.EVAL)], [RewardResult(-1e6, rewards=(Reward(-1e6),))])
    assert (found.rewards, found.error) == ((Reward(-1e6),), None)
