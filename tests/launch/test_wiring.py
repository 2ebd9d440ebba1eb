"""What a run's roles are built from, by its configuration."""

import asyncio
import json

import pytest

from offbeat.config import from_dict, load
from offbeat.errors import UserError
from offbeat.launch.wiring import make_mixture, publishes_pieces, try_rewards
from offbeat.rewards.pool import RewardPool


@pytest.mark.parametrize(
    ("overrides", "is_away", "in_pieces"),
    [
        ([], False, False),
        ([], True, True),
        (["--weights.deltas=always"], False, True),
        (["--weights.deltas=never"], False, False),
        (["--weights.deltas=never"], True, True),
        (["--weights.store=/mnt/store"], False, True),
        (["--serve.behind-proxy"], False, True),
        (["--serve.host=0.0.0.0"], False, True),
    ],
)
def test_versions_are_published_in_pieces_where_somebody_else_may_fetch_them(overrides, is_away, in_pieces):
    assert publishes_pieces(load(None, overrides), is_away=is_away) is in_pieces


@pytest.fixture
def trial(tmp_path):
    """Tries a reward, given as source code of a function `judge`, on the first of some rows."""

    def tried(rows, code, **keys):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "judge.py").write_text(code)
        task = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "reward": f"{tmp_path}/judge.py:judge", **keys}
        config = from_dict({"task": task})
        mixture = make_mixture(config)

        async def attempt():
            pool = RewardPool(1, 5.0, mixture.rewards, tmp_path / "rewards.log")
            try:
                return await try_rewards(config, mixture, pool)
            finally:
                await pool.close()

        (found,) = asyncio.run(attempt())
        return found

    return tried


EQUAL = "def judge(response, answer):\n    return float(response == answer)\n"
SOLUTIONS = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(4)]


@pytest.mark.parametrize(
    "code",
    [
        EQUAL,
        "def judge(completions, answer, **kwargs):\n    return [float(a == c) for a, c in zip(completions, answer)]\n",
    ],
)
def test_a_reward_that_needs_an_answer_is_refused_where_no_row_has_one(trial, code):
    with pytest.raises(UserError, match=r'^task\.answer = "answer": task rows has no such column.*solution"'):
        trial(SOLUTIONS, code)


def test_a_named_reward_that_needs_an_answer_is_refused_likewise(trial):
    with pytest.raises(
        UserError, match=r"only prompt, total, so .*; set task\.answer to the column with the right answer"
    ):
        trial([{"prompt": "1+1=", "total": 2}, {"prompt": "1+2=", "total": 3}], "", reward="number")


@pytest.mark.parametrize(
    ("rows", "code", "keys"),
    [
        (SOLUTIONS, EQUAL, {"answer": "solution"}),
        (SOLUTIONS, EQUAL.replace("answer)", "answer=None)", 1), {}),
        (SOLUTIONS, EQUAL, {"answer": None}),
        ([*SOLUTIONS, {"prompt": "2+2=", "answer": "4"}], EQUAL, {}),
    ],
)
def test_a_reward_may_need_an_answer_that_some_row_has_or_that_nobody_promised(trial, rows, code, keys):
    trial(rows, code, **keys)


@pytest.mark.parametrize("column", ["ground_truth", "solution", "target"])
def test_a_reward_is_tried_on_the_right_answer_where_its_column_has_a_usual_name(trial, column):
    code = f"def judge(completions, {column}):\n    return [float(a == b) for a, b in zip(completions, {column})]\n"
    found = trial([{"prompt": f"{i}+1=", column: str(i + 1)} for i in range(4)], code)
    assert (found.value, found.answer == found.problem.info[column]) == (1.0, True)


def test_a_reward_is_tried_on_an_empty_answer_where_the_right_one_is_unknown(trial):
    found = trial([{"prompt": f"{i}+1="} for i in range(4)], "def judge(response):\n    return float(not response)\n")
    assert (found.value, found.answer) == (1.0, None)
