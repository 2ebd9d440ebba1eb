"""Keys of TRL and verl are answered with ours, wherever they are written."""

from __future__ import annotations

import re

import pytest

import offbeat
from offbeat.cli.main import main
from offbeat.config import load
from offbeat.config.keys import known_keys
from offbeat.config.other_names import ELSEWHERE, IN_PYTHON, SECTIONS, TRL, VERL, known_elsewhere
from offbeat.errors import UserError


@pytest.mark.parametrize("name, ours", [*TRL.items(), *VERL.items(), *ELSEWHERE.items()])
def test_every_name_leads_to_a_key_that_exists_or_says_why_there_is_none(name: str, ours: str):
    assert ours.startswith("no key: ") or ours.split(" ")[0] in known_keys()


@pytest.mark.parametrize("section", ["dataset", "training", "grpo", *SECTIONS])
def test_a_section_of_a_usual_name_is_answered_with_the_sections_that_hold_its_settings(section, tmp_path):
    (tmp_path / "run.toml").write_text(f"[{section}]\nwhatever = 1\n")
    with pytest.raises(UserError, match=r": unknown section; its settings are in \[") as caught:
        load(tmp_path / "run.toml")
    named = re.findall(r"\[+(\w+)\]+ *(?:,|and|here)", str(caught.value).partition("are in ")[2])
    assert named
    assert set(named) <= {key.split(".")[0] for key in known_keys()}


@pytest.mark.parametrize(
    "name, key",
    [
        ("num_generations", "batch.group_size"),
        ("beta", "loss.kl_coef"),
        ("learning_rate", "optimizer.lr"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("max_prompt_length", "rollout.max_prompt_tokens"),
        ("per_device_train_batch_size", "batch.groups_per_step"),
        ("num_iterations", "batch.updates_per_step"),
        ("epsilon", "loss.clip_low"),
        ("vllm_mode", "rollout.engine"),
        ("save_steps", "checkpoint.every"),
        ("max_steps", "run.steps"),
        ("output_dir", "run.dir"),
        ("bf16", "model.dtype"),
        ("reward_weights", "reward.weights"),
    ],
)
def test_the_names_of_trl_are_answered_in_a_file_on_the_command_line_and_in_python(name, key, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f"[training]\n{name} = 1\n\n[model]\n")
    with pytest.raises(UserError, match=rf"run\.toml:1: \[training\]: unknown section; TRL's {name} is {key}\b.* here"):
        load(tmp_path / "run.toml")
    assert main(["train", f"--{name}", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"offbeat: --{name}: unknown option; TRL's {name} is --{key}")
    argument = re.escape(IN_PYTHON.get(key, key))
    with pytest.raises(UserError, match=rf"^{name} = 1: unknown key; TRL's {name} is {argument}.* here"):
        offbeat.train({}, **{name: 1})


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("reward_funcs", print, "reward_funcs: unknown key; TRL's reward_funcs is reward= here"),
        ("train_dataset", object(), "train_dataset: unknown key; TRL's train_dataset is task= here"),
        ("processing_class", object(), "processing_class: unknown key; TRL's processing_class is model.tokenizer here"),
        ("dataset", [1], "dataset = [1]: unknown key; dataset is task= here"),
        ("batch_size", 4, "batch_size = 4: unknown key; batch_size is batch.groups_per_step here (in prompts"),
        ("epochs", 3, "epochs = 3: unknown key; epochs is steps= here (in steps, not epochs)"),
    ],
)
def test_python_is_answered_with_pythons_arguments_and_without_the_text_of_objects(name, value, told):
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        offbeat.train({}, **{name: value})


def test_a_key_of_verl_is_known_by_the_end_of_its_name(tmp_path):
    with pytest.raises(
        UserError, match=r"^--rollout\.n = 8: unknown key; verl's rollout\.n is batch\.group_size here$"
    ):
        load(None, ["--rollout.n", "8"])
    with pytest.raises(UserError, match=r"verl's actor\.optim\.lr is optimizer\.lr here$"):
        load(None, ["--actor_rollout_ref.actor.optim.lr", "1e-6"])
    (tmp_path / "run.toml").write_text("[data]\ntrain_batch_size = 8\n")
    with pytest.raises(UserError, match=r"verl's data\.train_batch_size is batch\.groups_per_step here$"):
        load(tmp_path / "run.toml")


def test_a_name_without_a_counterpart_says_why(tmp_path):
    with pytest.raises(UserError, match=r"TRL's logging_steps has no key: every step is logged$"):
        load(None, ["--run.logging-steps", "1"])


def test_a_misspelling_of_ours_is_still_a_misspelling():
    assert known_elsewhere(["batch", "group_sise"]) is None
    with pytest.raises(UserError, match="did you mean group_size"):
        load(None, ["--batch.group-sise", "8"])


def test_an_object_in_place_of_a_path_is_told_where_rows_go():
    with pytest.raises(
        UserError, match=r"task\.path = .*: wants text, not a list; .* offbeat\.train\(\.\.\., task=rows\)$"
    ):
        offbeat.train({"task": [{"source": "file", "path": [{"prompt": "1+1="}]}]})
    with pytest.raises(UserError, match=r"task\.path = 3: wants text, not a whole number; put it in quotes$"):
        offbeat.train({"task": [{"source": "file", "path": 3}]})
