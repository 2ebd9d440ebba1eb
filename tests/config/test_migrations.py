"""Configurations with keys that no longer exist: a stored one goes on without them, a file of the user's is refused."""

from __future__ import annotations

import json
import logging

import pytest

from offbeat.config import fixed_changes, from_dict, load, resolved
from offbeat.config.keys import TASK_MODELS, field_at
from offbeat.config.migrations import REMOVED, migrated, removed_at
from offbeat.errors import UserError


def old(**changes: dict) -> dict:
    """A configuration as an older Offbeat stored it, with every removed key at its default."""
    data = resolved(from_dict({}))
    for (section, key), removed in REMOVED.items():
        table = data["task"][0] if section == "task" else data[section]
        table[key] = changes.get(section, {}).get(key, removed.default)
    return data


def test_a_removed_key_is_no_key_any_more():
    for section, key in REMOVED:
        models = TASK_MODELS.values() if section == "task" else ()
        assert field_at((section, key), {}) is None
        assert not any(key in model.model_fields for model in models)
    assert removed_at(("task", 3, "tail_cap")) is REMOVED["task", "tail_cap"]
    assert removed_at(("optimizer", "lr")) is None


def test_removed_keys_at_their_defaults_are_dropped_silently(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(old()))
    assert load(tmp_path / "config.json") == from_dict({})
    assert caplog.records == []


@pytest.mark.parametrize(
    "section, key, value, instead",
    [
        ("optimizer", "beta1", 0.8, "its value is always 0.9 now"),
        ("task", "tail_cap", 20, "the longest answer has 40 lines"),
        ("loss", "stop_logprob_gap", 0.5, "the gap raises an alarm at loss.max_logprob_gap"),
    ],
)
def test_a_dropped_value_that_mattered_is_logged_in_one_line(tmp_path, caplog, section, key, value, instead):
    (tmp_path / "config.json").write_text(json.dumps(old(**{section: {key: value}})))
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "config.json") == from_dict({})
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/config.json: the key {section}.{key} = {value} is ignored, because it was removed in "
        f"November 2026; {instead}"
    )


def test_the_old_key_of_the_overlong_penalty_becomes_the_weight_that_does_the_same(tmp_path, caplog):
    stored = old(reward={"overlong_penalty": 0.5})
    stored["reward"]["overlong_tokens"] = 4
    (tmp_path / "config.json").write_text(json.dumps(stored))
    now = load(tmp_path / "config.json").reward
    assert (now.overlong_tokens, now.weights) == (4, {"overlong": 0.5})
    assert fixed_changes(stored, from_dict({"reward": {"overlong_tokens": 4, "weights": {"overlong": 0.5}}})) == []
    assert caplog.records == []


def test_a_removed_key_is_no_change_that_forbids_a_resume():
    assert fixed_changes(old(rollout={"top_p": 0.5}), from_dict({})) == []


def test_migrating_leaves_what_it_was_given():
    data = old()
    assert "top_p" not in migrated(data)["rollout"]
    assert data == old()


def test_a_file_or_a_command_line_with_a_removed_key_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nlr = 1e-4\nbeta1 = 0.8\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert str(caught.value) == (
        f"{file}:3: optimizer.beta1 = 0.8: this key was removed in November 2026; take it out "
        "(its value is always 0.9 now)"
    )
    with pytest.raises(UserError, match=r"^--task.tail_cap = 20: this key was removed in November 2026; take it out"):
        load(None, ["--task.tail-cap", "20"])


def test_the_paced_engine_is_for_tests_alone(monkeypatch):
    assert load(None, ["--rollout.engine", "paced"]).rollout.engine == "paced"
    monkeypatch.delenv("OFFBEAT_TESTING")
    with pytest.raises(UserError) as caught:
        load(None, ["--rollout.engine", "paced"])
    assert str(caught.value) == (
        '--rollout.engine = "paced" is only for tests, because the paced engine has no model; set it to "auto", '
        '"embedded", "vllm" or "sglang" (tests set OFFBEAT_TESTING=1)'
    )
    with pytest.raises(UserError, match='must be "auto", "embedded", "vllm" or "sglang"; did you mean "vllm"'):
        load(None, ["--rollout.engine", "vlm"])
