"""What a coordinator may not choose for a machine that joins it."""

import json
from pathlib import Path

import pytest

from offbeat.config import from_dict, resolved
from offbeat.config.keys import known_keys
from offbeat.config.local_keys import LOCAL_KEYS, with_local_keys
from offbeat.errors import UserError
from offbeat.launch.joining import Invitation, own_config
from offbeat.ledger.workers import Role


def told(**keys) -> dict:
    """A configuration as it comes from the network."""
    return resolved(from_dict({}, {name.replace("__", "."): value for name, value in keys.items()}))


def owned(folder: Path, config: dict, *words: str, role: Role = Role.ROLLOUT, **more):
    return own_config(Invitation("http://x", role, folder, "w", **more), config, words)


VLLM = {"rollout__engine": "vllm", "rollout__workers": 1}
CHOSEN = [
    (Role.ROLLOUT, {**VLLM, "engine__python": "x.sh"}, "engine.python", "a program"),
    (
        Role.ROLLOUT,
        {**VLLM, "engine__arguments": ["--middleware", "x"]},
        "engine.arguments",
        "a program's argum",
    ),
    (Role.ROLLOUT, {**VLLM, "engine__url": "http://10.0.0.1:80"}, "engine.url", "a server"),
    (Role.ROLLOUT, {"model__path": "/home/ann/models/x"}, "model.path", "a folder"),
    (Role.ROLLOUT, {"model__path": "../x"}, "model.path", "a folder"),
    (Role.ROLLOUT, {"weights__store": "/mnt/shared"}, "weights.store", "a folder"),
    (Role.ROLLOUT, {"weights__store": "file:///etc"}, "weights.store", "a folder"),
    (Role.TRAINER, {"model__path": "~/x"}, "model.path", "a folder"),
    (Role.TRAINER, {"weights__store": "runs/store"}, "weights.store", "a folder"),
    (Role.TRAINER, {"loss__name": "x.py:loss"}, "loss.name", "code"),
    (Role.TRAINER, {"loss__advantage": "os:system"}, "loss.advantage", "code"),
]


@pytest.mark.parametrize("role, keys, key, what", CHOSEN)
def test_what_a_coordinator_chooses_for_a_machine_is_refused_with_the_way_out(tmp_path, role, keys, key, what):
    with pytest.raises(UserError) as caught:
        owned(tmp_path, told(**keys), role=role)
    said = str(caught.value)
    assert said.startswith(f"{key} = ")
    assert f"comes from the coordinator, which may not choose {what}" in said
    assert f"give --{key} here, or allow it with --trust-coordinator" in said
    assert "\n" not in said


@pytest.mark.parametrize("role, keys, key, what", CHOSEN)
def test_a_trusted_coordinator_may_choose(tmp_path, role, keys, key, what):
    config = told(**keys)
    assert resolved(owned(tmp_path, config, role=role, trusts_coordinator=True)) == config


def test_what_is_said_here_holds_whatever_the_coordinator_says(tmp_path):
    config = told(**VLLM, engine__python="x.sh", engine__arguments=["--evil"], model__path="/theirs")
    words = ["--engine.python=/here/python", "--engine.arguments", '["--seed", "9"]', "--model.path", "/models/here"]
    own = owned(tmp_path, config, *words)
    assert (own.engine.python, own.engine.arguments) == ("/here/python", ["--seed", "9"])
    assert own.model.path == "/models/here"


def test_what_a_role_does_not_need_is_forgotten(tmp_path):
    foreign = told(
        engine__python="x.sh", engine__arguments=["--evil"], run__access="everyone", ledger__backup="/theirs"
    )
    own = owned(tmp_path, {**foreign, "model": {**foreign["model"], "chat_template": "/theirs"}})
    assert (own.engine.python, own.engine.arguments, own.run.access, own.ledger.backup) == (None, [], "private", None)
    assert own.model.chat_template is None
    own = owned(tmp_path, told(**VLLM, engine__python="x.sh"), "--rollout.engine=embedded")
    assert own.engine.python is None
    owned(tmp_path, told(loss__name="x.py:loss"))  # a worker has no loss
    own = owned(tmp_path, told(**VLLM, engine__python="x.sh"), "--engine.url=http://127.0.0.1:8000")
    assert own.engine.python is None, "whoever attaches to a server starts none"


@pytest.mark.parametrize(
    "keys", [{}, {"model__path": "Qwen/Qwen3-0.6B"}, {"weights__store": "s3://bucket/run"}, {"loss__name": "dapo"}]
)
def test_names_that_choose_nothing_of_the_machines_are_taken(tmp_path, keys):
    for role in (Role.ROLLOUT, Role.TRAINER):
        assert resolved(owned(tmp_path, told(**keys), role=role)) == told(**keys)


def test_what_the_file_in_the_workers_folder_says_is_what_it_took(tmp_path):
    owned(tmp_path, told(engine__python="x.sh"))
    file = tmp_path / "rollout-config.json"
    assert json.loads(file.read_text())["engine"]["python"] is None
    assert file.stat().st_mode & 0o077 == 0


def test_the_list_names_keys_that_there_are():
    assert {local.key for local in LOCAL_KEYS} <= set(known_keys())
    assert with_local_keys(told(), (), "rollout", from_dict) == from_dict(told())
