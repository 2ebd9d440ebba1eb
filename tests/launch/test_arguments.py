"""What the arguments of `offbeat.train` mean, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.config.schema import EvalConfig, OptimizerConfig, RunConfig
from offbeat.errors import UserError
from offbeat.launch.arguments import Prepared, prepare, read_reward

ROWS = [{"prompt": "1+1=", "answer": "2"}]


def right(response, answer):
    return float(response == answer)


def problem(ordinal):
    return {"prompt": f"{ordinal}+1="}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"


def made(rows: Path, config=None, *, task=None, reward=None, resume=None, **overrides) -> Prepared:
    return prepare(config, overrides, task=task, reward=reward, resume=resume, rows=rows)


def test_without_arguments_it_is_the_demo(rows):
    config = made(rows).config
    assert (config.optimizer.lr, config.run.steps, config.task[0].source) == (1e-4, 150, "arithmetic")


def test_the_demos_settings_hold_for_its_model_with_other_tasks(rows):
    config = made(rows, task=ROWS, reward=right).config
    assert (config.optimizer.lr, config.task[0].source) == (1e-4, "file")


@pytest.mark.parametrize("model", ["some/model-1.5b", {"path": "some/model-1.5b"}])
def test_another_model_never_gets_the_demos_learning_rate(rows, model):
    config = made(rows, task=ROWS, model=model).config
    assert config.model.path == "some/model-1.5b"
    assert (config.optimizer, config.run, config.eval) == (OptimizerConfig(), RunConfig(), EvalConfig())


def test_short_forms_are_keys(rows):
    config = made(rows, model="m", steps=7, name="first", lr=2e-6, batch={"group_size": 4}).config
    assert (config.model.path, config.run.steps, config.run.name) == ("m", 7, "first")
    assert (config.optimizer.lr, config.batch.group_size) == (2e-6, 4)


def test_columns_are_named_beside_the_rows(rows):
    task = {"rows": [{"question": "1+1=", "solution": 2}], "prompt": "question", "answer": "solution", "held_out": 0.1}
    (section,) = made(rows, task=task).config.task
    assert (section.prompt, section.answer, section.held_out) == ("question", "solution", 0.1)
    assert Path(section.path).read_text() == '{"question":"1+1=","solution":2}\n'


def test_rows_may_have_a_column_source_and_several_tasks_are_told_from_rows(rows):
    (only,) = made(rows, task=[{"prompt": "a", "source": "olympiads"}]).config.task
    assert only.source == "file"
    several = made(rows, task=[{"rows": ROWS, "weight": 2.0}, {"source": "arithmetic"}, {"rows": ROWS}]).config.task
    assert [(task.source, task.weight) for task in several] == [("file", 2.0), ("arithmetic", 1.0), ("file", 1.0)]
    assert several[0].path != several[2].path


@pytest.mark.parametrize(
    "task, source",
    [
        ("train.jsonl", "file"),
        ("arr.json", "file"),
        (Path("train.parquet"), "file"),
        ("open/set", "dataset"),
        ("tasks.py:make", "function"),
    ],
)
def test_a_text_names_a_file_a_dataset_or_a_function(rows, task, source):
    (section,) = made(rows, task=task).config.task
    assert (section.source, section.path) == (source, str(task))


def test_a_function_is_a_source_and_goes_beside_the_configuration(rows):
    prepared = made(rows, task=problem)
    (section,) = prepared.config.task
    assert section.source == "function"
    assert prepared.functions == {section.path: problem}


def test_a_resumed_run_takes_functions_again_but_no_rows(rows, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert list(made(rows, task=problem, resume=tmp_path).functions.values()) == [problem]
    with pytest.raises(UserError, match=r"^task: a resumed run keeps the tasks .*; leave out task$"):
        made(rows, task=ROWS, resume=tmp_path)


def test_rewards_of_a_list_are_named_after_their_functions():
    named, weights = read_reward([right, "number", right])
    assert named == {"right": right, "number": "number", "right-2": right}
    assert weights == {}


def test_weights_go_into_the_configuration(rows):
    prepared = made(rows, reward={"right": (right, 2), "length": (lambda response: 0.0, 0.5)})
    assert prepared.config.reward.weights == {"right": 2.0, "length": 0.5}
    assert prepared.reward["right"] is right


def test_a_reward_by_name_stands_in_the_configuration(rows):
    prepared = made(rows, task=ROWS, reward="exact")
    assert (prepared.reward, prepared.config.task[0].reward) == (None, "exact")


@pytest.mark.parametrize(
    "given, told",
    [
        ({"loss": "dapo"}, '^loss = "dapo": wants a dict of its keys, not text; write loss={"name": "dapo"}$'),
        ({"rollout": "vllm"}, 'write rollout={"engine": "vllm"}$'),
        ({"eval": 5}, 'write eval={"every": 5}$'),
        ({"batch": 16}, 'write batch={"groups_per_step": [0-9]+}$'),
        ({"loss": 3}, 'write loss={"name": "grpo"}$'),
        ({"ledger": "x"}, 'write ledger={"[a-z_]+": .*}$'),
        ({"step": 3}, r"did you mean steps\?$"),
        ({"stpes": 3}, r"did you mean steps\?$"),
        ({"optimiser": {"lr": 1.0}}, r"did you mean optimizer\?$"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_in_words_of_python(rows, given, told):
    with pytest.raises(UserError, match=told):
        made(rows, **given)


@pytest.mark.parametrize("reward", [3.0, [], {}, {"weights": {"right": 2}}, [None]])
def test_what_is_no_reward_is_refused(reward):
    with pytest.raises(UserError, match=r"^reward: "):
        read_reward(reward)
