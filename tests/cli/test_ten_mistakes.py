"""Ten natural mistakes on a new task, through the real command in a user's folder: each is one line with a remedy.

All are made with a model whose weights would fail to load, with another message. So a mistake that is told was told
before a model was loaded.
"""

from __future__ import annotations

import json
import shutil

import pytest
from real_command import Command, command_in

from offbeat.model.loading import TINY_FOLDER

ROWS = [{"question": f"{n}+{n}=", "answer": 2 * n} for n in range(1, 401)]
REWARDS = """
def reward(response, answer):
    return float(response.strip() == answer)


def says(response):
    return "good"


def compares(response, answer):
    return float(answer == 42)
"""
RUN = """
[model]
path = "model"

[[task]]
source = "file"
path = "problems.jsonl"
prompt = "question"
reward = "reward.py:reward"

[batch]
groups_per_step = 2
group_size = 2
"""
NO_TENSOR = b'{"none": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'


@pytest.fixture
def user(tmp_path):
    """A user with a task that is right but for its model's weights."""
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "reward.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(RUN)
    shutil.copytree(TINY_FOLDER, tmp_path / "model")
    weights = len(NO_TENSOR).to_bytes(8, "little") + NO_TENSOR + bytes(4)
    (tmp_path / "model" / "model.safetensors").write_bytes(weights)
    with command_in(tmp_path) as command:
        yield command


def refusal(user: Command, *words: str) -> str:
    """What `offbeat train` says, which is what `--dry-run` says; neither leaves a run behind."""
    told = user.fails("train", "run.toml", "--name=first", *words)
    assert user.fails("train", "run.toml", "--name=first", *words, "--dry-run") == told
    assert not (user.folder / "runs" / "first").exists()
    return told


def test_without_a_mistake_the_model_would_be_loaded(user):
    status, out, errors = user("train", "run.toml", "--name=first")
    assert (status, "loading" in out, "model.path = 'model': the weights lack " in errors) == (2, True, True)
    assert not (user.folder / "runs" / "first").exists()


def test_1_a_wrong_column(user):
    told = "problems.jsonl:1: the row has no column 'problem'; it has question, answer"
    assert refusal(user, "--task.prompt=problem") == told


def test_2_a_misspelt_reward(user):
    told = "task.reward = 'reward.py:rewrd': reward.py has no function 'rewrd'; did you mean 'reward'?"
    assert refusal(user, "--task.reward=reward.py:rewrd") == told
    told = 'task.reward = "rewards.py:reward": there is no file rewards.py; did you mean reward.py?'
    (user.folder / "rewards.py").unlink()  # the command's own, for other tests
    assert refusal(user, "--task.reward=rewards.py:reward") == told


def test_3_a_reward_that_returns_text(user):
    told = user.fails("train", "run.toml", "--task.reward=reward.py:says")
    assert told.startswith(
        "reward reward.py:says: its trial failed: the reward returned 'good', a str; return a finite number"
    )


def test_4_a_prompt_that_is_too_long(user):
    with (user.folder / "problems.jsonl").open("a") as file:
        file.write(json.dumps({"question": "1+" * 40 + "1=", "answer": 41}) + "\n")
    assert refusal(user) == (
        "problems.jsonl:401: its prompt has 82 tokens, over rollout.max_prompt_tokens = 64; 1 of 401 rows is too long; "
        'raise this limit to 82 or more, or set rollout.long_prompts = "skip" or "cut"'
    )


def test_5_a_batch_that_does_not_divide(user):
    assert refusal(user, "--batch.updates-per-step=3") == (
        "--batch.updates_per_step = 3: must divide batch.groups_per_step = 2, because each update trains whole groups"
    )


@pytest.mark.full
def test_6_a_wrong_model_path(user):
    assert refusal(user, "--model.path=./modle") == ("model.path = './modle': no such folder; did you mean 'model'?")
    told = refusal(user, "--model.path=someone/modle")
    assert told.startswith("model.path = 'someone/modle': no such folder, and the Hugging Face hub cannot be reached")


@pytest.mark.full
def test_7_a_wrong_device(user):
    assert refusal(user, "--model.device=gpu") == (
        '--model.device = "gpu": must be "auto", "cpu", "cuda", "cuda:1" and so on, or "mps"'
    )
    told = "model.device = 'cuda:99': this machine has only "
    status, _, errors = user("train", "run.toml", "--model.device=cuda:99")
    assert (status, errors.startswith(f"offbeat: {told}"), errors.count("\n")) == (2, True, 1)
    status, out, errors = user("train", "run.toml", "--model.device=cuda:99", "--dry-run")
    assert (status, errors.startswith(f"offbeat: {told}"), errors.count("\n")) == (2, True, 1)
    assert out.startswith("would start a run in runs/")  # what needs no device is looked at all the same


def test_8_a_key_of_trl(user):
    assert refusal(user, "--batch.num-generations=8") == (
        "--batch.num_generations = 8: unknown key; TRL's num_generations is batch.group_size here"
    )


def test_9_an_answer_that_is_compared_with_a_number(user):
    words = ("train", "run.toml", "--task.reward=reward.py:compares", "--task.shuffle=false", "--task.held-out=0")
    status, _, errors = user(*words, "--dry-run")
    assert (status, errors) == (
        0,
        "warning: the right answer '2' of a problem of task problems (problems.jsonl:1) earned 0 in a trial: check "
        "task.reward (answers are passed as text, so compare text, or convert both the response and the answer); "
        "ignore this if the reward wants more than the bare answer\n",
    )
    _, _, again = user(*words)
    assert again.startswith(errors)  # and then the model


def test_10_an_empty_file(user):
    (user.folder / "problems.jsonl").write_text("")
    told = "task.path = 'problems.jsonl': it has no row; give at least one, with a prompt"
    assert refusal(user) == told
