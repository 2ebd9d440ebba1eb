"""A start that is refused leaves nothing that would be in the way of the next one, by whichever command it was made."""

from __future__ import annotations

import shutil
import socket

import pytest
from real_command import QUICK, Command, command_in

from offbeat.model.loading import TINY_FOLDER

pytestmark = pytest.mark.full

ONE_STEP = ("--run.steps=1",)
NO_TENSOR = b'{"none": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'


@pytest.fixture
def offbeat(tmp_path):
    with command_in(tmp_path) as command:
        yield command


@pytest.fixture
def port():
    """A port that somebody else listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def model(offbeat: Command, weights: bytes) -> str:
    shutil.copytree(TINY_FOLDER, offbeat.folder / "model")
    (offbeat.folder / "model" / "model.safetensors").write_bytes(weights)
    return "--model.path=model"


def refused(offbeat: Command, *words: str) -> str:
    """The line of a refused start, after which its name is free and nothing is left of it."""
    told = offbeat.fails(*words)
    runs = offbeat.folder / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []
    return told


SUPERVISED, SERVE = ("train", "--rollout.workers=1"), ("serve",)


@pytest.mark.parametrize("words", [SUPERVISED, pytest.param(SERVE, marks=pytest.mark.full)])
def test_a_missing_certificate(offbeat, words):
    certificate = ("--serve.certificate=no.pem", "--serve.key=no.pem")
    told = refused(offbeat, *words, *QUICK, *certificate)
    assert told == "serve.certificate = 'no.pem': no such file; give a PEM file"


@pytest.mark.parametrize("words", [pytest.param(SUPERVISED, marks=pytest.mark.full), SERVE])
def test_a_port_in_use(offbeat, port, words):
    told = refused(offbeat, *words, *QUICK, f"--serve.port={port}")
    assert told == (
        f"serve.host = '127.0.0.1', serve.port = {port}: cannot listen there: Address already in use; choose another "
        "address, or port 0 for any free port"
    )


@pytest.mark.full
def test_a_misspelt_reward_of_a_supervised_run(offbeat):
    told = refused(offbeat, "train", *QUICK, "--rollout.workers=1", "--task.reward=rewards.py:rasing")
    assert told.endswith("has no function 'rasing'; did you mean 'raising'?")


def test_an_engine_that_is_not_installed(offbeat):
    told = refused(offbeat, "train", *QUICK, "--rollout.workers=1", "--rollout.engine=sglang")
    assert told.startswith('rollout.engine = "sglang": ')
    assert "has no package sglang; install it there, name the Python" in told


def test_weights_that_were_cut_off(offbeat):
    path = model(offbeat, (TINY_FOLDER / "model.safetensors").read_bytes()[:-1000])
    for words in ((), ("--rollout.workers=1",), ("--dry-run",)):
        told = refused(offbeat, "train", *QUICK, path, *words)
        assert told.startswith("model.path: model/model.safetensors is damaged (tensor ")
        assert told.endswith("lies beyond the end of the file); copy it again")


def test_a_loss_that_is_misspelt_is_told_before_the_model_is_loaded(offbeat):
    path = model(offbeat, len(NO_TENSOR).to_bytes(8, "little") + NO_TENSOR + bytes(4))
    (offbeat.folder / "loss.py").write_text("def loss(tokens, settings):\n    return tokens.logprobs\n")
    told = refused(offbeat, "train", *QUICK, path, "--loss.name=loss.py:lss")
    assert told == "loss.name = 'loss.py:lss': loss.py has no function 'lss'; did you mean 'loss'?"


@pytest.mark.full
def test_a_model_that_only_the_trainer_finds_wrong(offbeat):
    path = model(offbeat, len(NO_TENSOR).to_bytes(8, "little") + NO_TENSOR + bytes(4))
    for words in ((), ("--rollout.workers=1",)):
        status, _, errors = offbeat("train", *QUICK, path, *words)
        assert status == 2
        assert "model.path = 'model': the weights lack " in errors.splitlines()[-1]
        assert list((offbeat.folder / "runs").iterdir()) == []
    offbeat.succeeds("train", *QUICK, *ONE_STEP)  # under the same name


def test_a_folder_of_the_users_own_is_never_removed(offbeat):
    (offbeat.folder / "runs" / "a").mkdir(parents=True)
    (offbeat.folder / "runs" / "a" / "config.json").write_text("{}")
    (offbeat.folder / "runs" / "a" / "thesis.tex").touch()
    offbeat.fails("train", *QUICK, "--task.reward=rewards.py:rasing", "--run.name=b")
    assert offbeat.fails("train", *QUICK, "--resume", "runs/a")
    assert {file.name for file in (offbeat.folder / "runs" / "a").iterdir()} >= {"config.json", "thesis.tex"}
