"""Each token's advantage, and what a user's own function may not give."""

from dataclasses import replace

import numpy as np
import pytest
from learning_samples import make_samples

from offbeat.errors import UserError
from offbeat.trainer.advantages import ADVANTAGES, GaeSettings, credit, group_centred

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
    with pytest.raises(
        UserError, match=r"^loss\.advantage returned shape \(3,\) for 4 answers; return one number for each"
    ):
        credit(some_samples(), lambda rewards, groups: rewards[:3], None, NOTHING)


def released(rewards: list[float], prompts: list[int], earlier: dict[int, tuple[float, ...]]):
    """Answers that were claimed one by one, with what is known of siblings that are not among them."""
    made = make_samples(np.random.default_rng(0), [(2, [1])] * len(rewards))
    return [
        replace(sample, reward=reward, siblings=prompt, earlier=earlier.get(prompt, ()))
        for sample, reward, prompt in zip(made, rewards, prompts, strict=True)
    ]


def recalled(name: str, samples) -> list[float]:
    found = credit(samples, ADVANTAGES[name], None, [None] * len(samples), recalls_siblings=True)
    return [float(a[0]) for a in found.advantages]


def test_a_released_answer_is_judged_against_the_siblings_known_in_and_out_of_its_batch():
    samples = released([1.0, 0.0, 1.0], [7, 7, 3], {7: (0.5, 0.5), 3: (0.25,)})
    assert recalled("leave_one_out", samples) == pytest.approx([2 / 3, -2 / 3, 0.75])
    spread = np.sqrt(np.var([1, 0, 0.5, 0.5], ddof=1)), np.sqrt(np.var([1, 0.25], ddof=1))
    wanted = [2 / 3 / spread[0], -2 / 3 / spread[0], 0.75 / spread[1]]
    assert recalled("siblings", samples) == pytest.approx(wanted, rel=1e-5)


def test_a_released_answer_without_a_known_sibling_has_no_advantage():
    samples = released([1.0, 0.0, 1.0], [7, 7, 3], {})
    assert recalled("siblings", samples)[2] == recalled("leave_one_out", samples)[2] == 0


def test_where_all_siblings_are_in_the_batch_leaving_one_out_is_what_it_is_for_whole_groups():
    whole = some_samples()
    apart = [replace(s, group=10 + i, siblings=s.group) for i, s in enumerate(whole)]
    found = credit(whole, ADVANTAGES["leave_one_out"], None, NOTHING)
    assert recalled("leave_one_out", apart) == [a[0] for a in found.advantages]


def test_the_mean_of_a_batch_is_that_of_the_batch_alone():
    samples = released([1.0, 0.0], [7, 7], {7: (1.0,) * 50})
    found = credit(samples, ADVANTAGES["batch"], None, NOTHING)
    assert [float(a[0]) for a in found.advantages] == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], rel=1e-5)


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
