"""Rewards with TRL's signature, and sums of several rewards, in real reward processes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from offbeat.errors import UserError
from offbeat.rewards.child import MAX_SAMPLES, BadValue, ListReward, takes_lists
from offbeat.rewards.pool import RewardInput, RewardPool, RewardResult

CHAT = [{"role": "user", "content": "1+1?"}]


def score(tmp_path: Path, reward, samples: list[RewardInput], timeout_s: float = 5.0) -> list[RewardResult]:
    async def judged() -> list[RewardResult]:
        pool = RewardPool(1, timeout_s, {"r": reward}, tmp_path / "rewards.log")
        try:
            return await pool.score("r", samples)
        finally:
            await pool.close()

    return asyncio.run(judged())


def check(tmp_path: Path, reward, trial: RewardInput) -> None:
    async def checked() -> None:
        pool = RewardPool(1, 5.0, {"r": reward}, tmp_path / "rewards.log")
        try:
            await pool.check({"r": trial})
        finally:
            await pool.close()

    asyncio.run(checked())


def values(results: list[RewardResult]) -> list[float | None]:
    return [result.value for result in results]


def sample(response: str, answer: str = "2", **info) -> RewardInput:
    return RewardInput(response, answer, "1+1=", info, [5, 6])


def test_it_is_called_with_lists_of_everything_that_trl_passes(tmp_path):
    def reward(prompts, completions, completion_ids, answer, level, **columns):
        assert list(columns) == ["id"]
        rows = zip(prompts, completions, completion_ids, answer, level, strict=True)
        return [float(row == ("1+1=", "2", [5, 6], "2", 3)) for row in rows]

    samples = [sample("2", level=3, id=1), sample("3", level=3, id=2), sample("2", level=4, id=3)]
    assert values(score(tmp_path, reward, samples)) == [1.0, 0.0, 0.0]


def test_completions_of_a_chat_are_messages(tmp_path):
    def reward(completions, **kwargs):
        return [float(completion == [{"role": "assistant", "content": "2"}]) for completion in completions]

    assert values(score(tmp_path, reward, [RewardInput("2", "2", CHAT), RewardInput("3", "2", CHAT)])) == [1.0, 0.0]


def test_an_answer_that_is_a_number_stays_one(tmp_path):
    def reward(completions, answer):
        return [float(int(text) == right) for text, right in zip(completions, answer, strict=True)]

    assert values(score(tmp_path, reward, [RewardInput("42", "42", "6*7=", {"answer": 42})])) == [1.0]


def test_many_samples_share_few_calls(tmp_path):
    calls = tmp_path / "calls"

    def reward(completions, **kwargs):
        with calls.open("a") as file:
            file.write(f"{len(completions)}\n")
        return [float(text) for text in completions]

    assert values(score(tmp_path, reward, [sample(str(i)) for i in range(200)])) == [float(i) for i in range(200)]
    sizes = [int(line) for line in calls.read_text().splitlines()]
    assert sum(sizes) == 200
    assert max(sizes) > 8


def test_slow_calls_get_fewer_samples_and_quick_ones_more():
    reward = ListReward(lambda completions: [], "r")
    for _ in range(9):
        reward.note_duration(0.1, short_s=1.0)
    assert reward.num_samples == MAX_SAMPLES
    reward.note_duration(1.5, short_s=1.0)
    assert reward.num_samples == MAX_SAMPLES // 2


async def judge(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]


def test_it_may_be_async(tmp_path):
    assert values(score(tmp_path, judge, [sample("a"), sample("bb")])) == [1.0, 2.0]


def test_of_a_call_that_fails_only_the_samples_fail_that_cannot_be_judged(tmp_path):
    def reward(completions, **kwargs):
        return [1 / len(text.strip()) for text in completions]

    texts = ["aa", "b", " ", "cccc", "d", "", "ee", "f"]
    results = score(tmp_path, reward, [sample(text) for text in texts])
    assert values(results) == [0.5, 1.0, None, 0.25, 1.0, None, 0.5, 1.0]
    assert results[2].error.startswith("raised: ZeroDivisionError")


def test_a_list_that_is_too_short_for_two_is_refused_in_the_trial(tmp_path):
    def reward(completions, **kwargs):
        return [1.0]

    with pytest.raises(UserError, match="its trial failed: the reward returned 1 number for 2 completions"):
        check(tmp_path, reward, sample("2"))


def test_no_sample_of_a_list_of_the_wrong_length_is_judged_alone(tmp_path):
    def reward(completions, **kwargs):
        return [1.0 for text in completions if text]

    results = score(tmp_path, reward, [sample(text) for text in ("a", "", "c")])
    assert values(results) == [1.0, None, None]
    assert results[2].error == "value: the reward returned 1 number for 2 completions; return one for each"


@pytest.mark.parametrize(
    "prompt, read, told",
    [
        ("1+1=", lambda c: c[0]["content"], "completions are text here, because the prompt is text"),
        (CHAT, lambda c: c.strip(), "completions are lists of messages here, because the prompt is a chat"),
    ],
)
def test_a_reward_that_expects_another_form_of_completions_is_told_theirs(tmp_path, prompt, read, told):
    def reward(completions, **kwargs):
        return [float(read(each) == "2") for each in completions]

    with pytest.raises(UserError, match=told):
        check(tmp_path, reward, RewardInput("2", "2", prompt))


@pytest.mark.full
def test_a_sample_that_hangs_fails_alone(tmp_path):
    def reward(completions, **kwargs):
        import time

        if "hang" in completions:
            time.sleep(60)
        return [1.0] * len(completions)

    texts = ["a", "b", "c", "hang", "d"]
    results = score(tmp_path, reward, [sample(text) for text in texts], timeout_s=0.5)
    assert values(results) == [1.0, 1.0, 1.0, None, 1.0]
    assert results[3].error.startswith("timeout")


@pytest.mark.parametrize(
    "returned, told",
    [
        ([1.0], "returned 1 number for 2 completions"),
        (1.0, "1.0, a float; a reward that takes completions or completion_ids must return a list"),
        ([1.0, "yes"], "'yes', a str"),
        ([1.0, math.nan], "nan"),
    ],
)
def test_what_is_no_list_of_rewards_is_refused(returned, told):
    with pytest.raises(BadValue, match=told):
        ListReward(lambda completions: returned, "r").parts(returned, 2)


def test_arrays_are_lists_too():
    import numpy as np

    assert ListReward(lambda completions: 0, "r").parts(np.array([1, 2]), 2) == [
        [(1.0, "reward", -1)],
        [(2.0, "reward", -1)],
    ]


def test_none_leaves_a_part_out_and_a_sample_without_any_part_fails(tmp_path):
    def sums(completions, kind, **kwargs):
        return [1.0 if each == "sum" else None for each in kind]

    def products(completions, kind, **kwargs):
        return [0.5 if each == "product" else None for each in kind]

    kinds = ["sum", "product", "neither"]
    results = score(tmp_path, {"sums": sums, "products": products}, [sample("x", kind=kind) for kind in kinds])
    assert values(results) == [1.0, 0.5, None]
    assert [reward.name for reward in results[1].rewards] == ["products"]
    assert results[2].error == "value: the reward returned None: no reward applies to this answer"


def test_several_rewards_of_all_kinds_are_added_up_as_parts_of_their_names(tmp_path):
    rewards = {
        "right": lambda response, answer: float(response == answer),
        "async": judge,
        "number": "number",
        "own": lambda response: {"brief": 0.25, "polite": 0.5},
    }
    (result,) = score(tmp_path, rewards, [sample("2")])
    assert {reward.name: reward.value for reward in result.rewards} == {
        "right": 1.0,
        "async": 1.0,
        "number": 1.0,
        "brief": 0.25,
        "polite": 0.5,
    }
    assert result.value == 3.75


def test_if_one_of_several_fails_the_sample_fails_and_it_is_named(tmp_path):
    rewards = {"fine": lambda response: 1.0, "broken": lambda response: 1 / 0}
    (result,) = score(tmp_path, rewards, [sample("2")])
    assert result.value is None
    assert result.error.startswith("raised: ZeroDivisionError")
    assert result.error.endswith("(reward broken)")


def test_a_missing_column_is_named(tmp_path):
    def reward(completions, solution):
        return [0.0] * len(completions)

    (result,) = score(tmp_path, reward, [sample("2", id=1)])
    assert "needs a column 'solution', but the problem has only answer, id" in result.error


def test_what_only_trls_trainer_has_is_refused_at_the_start(tmp_path):
    def reward(completions, trainer_state):
        return []

    with pytest.raises(UserError, match="only TRL's trainer passes 'trainer_state'"):
        check(tmp_path, reward, sample("2"))


def test_the_signature_tells():
    assert takes_lists(lambda completions, **kwargs: [])
    assert takes_lists(lambda completion_ids, **kwargs: [])
    assert not takes_lists(lambda response, **kwargs: 0.0)
    assert not takes_lists(lambda **kwargs: 0.0)
