"""Each token's advantage, and what a user's own function may not give."""

from dataclasses import replace

import numpy as np
import pytest
from test_packing import make_samples

from offbeat.errors import UserError
from offbeat.learn.advantages import group_centred
from offbeat.learn.credit import GaeSettings, credit

NOTHING = [None] * 4


def some_samples():
    made = make_samples(np.random.default_rng(0), [(2, [3, 1]), (2, [2, 4])])
    return [replace(s, reward=r) for s, r in zip(made, [1.0, 0.0, 0.5, 0.5], strict=True)]


def test_all_tokens_of_an_answer_share_its_advantage():
    found = credit(some_samples(), group_centred, None, NOTHING)
    assert [a.tolist() for a in found.advantages] == [[0.5] * 3, [-0.5], [0, 0], [0] * 4]
    assert found.returns is None
    assert found.signal_share == 0.5


def test_an_advantage_of_ones_own_is_given_rewards_and_groups_and_must_give_one_number_each():
    seen = []

    def own(rewards, groups):
        seen.append((rewards.tolist(), groups.tolist()))
        return [2, 0, 0, -1]

    found = credit(some_samples(), own, None, NOTHING)
    assert seen == [([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1])]
    assert [a[0] for a in found.advantages] == [2, 0, 0, -1]
    with pytest.raises(UserError, match=r"^loss\.advantage: gave shape \(3,\) for 4 answers; one number each is want"):
        credit(some_samples(), lambda rewards, groups: rewards[:3], None, NOTHING)


def test_with_a_value_head_every_token_has_its_own_and_returns_are_what_it_should_have_said():
    samples = some_samples()
    samples[0] = replace(samples[0], rewards=((0, 0.75), (-1, 0.25)))
    values = [np.full(s.num_tokens, 0.25, np.float32) for s in samples]
    found = credit(samples, group_centred, GaeSettings(gamma=1.0, lam=1.0), values)
    assert [r.tolist() for r in found.returns] == [[1.0, 0.25, 0.25], [0.0], [0.5] * 2, [0.5] * 4]
    raw = np.concatenate(found.returns) - 0.25
    wanted = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(found.advantages), wanted, atol=1e-4)
    assert found.signal_share == 1.0


def test_gamma_and_lambda_reach_the_estimate():
    samples = some_samples()[:1]
    values = [np.array([0.0, 0.5, 0.0], np.float32)]
    found = credit(samples, group_centred, GaeSettings(gamma=0.5, lam=0.0), values)
    assert found.returns[0].tolist() == pytest.approx([0.25, 0.0, 1.0])


def test_what_is_not_trained_has_no_return_and_no_advantage():
    samples = [replace(s, mask=np.arange(s.num_tokens) % 2 == 0) for s in some_samples()]
    values = [np.where(s.mask, 0.1, np.nan) for s in samples]
    found = credit(samples, group_centred, GaeSettings(), values)
    for sample, advantages, returns in zip(samples, found.advantages, found.returns, strict=True):
        assert not advantages[~sample.mask].any()
        assert not returns[~sample.mask].any()


def test_nothing_is_credited_to_no_one():
    assert credit([], group_centred, None, []).signal_share == 0
    assert credit([], group_centred, GaeSettings(), []).advantages == ()
