"""Engines that a run cannot have as it is configured: refused in one line, before anything is written or started."""

import re

import pytest

import offbeat
from offbeat.cli.main import main
from offbeat.config import load
from offbeat.errors import UserError

ONE_PROCESS = (
    'rollout.engine = "vllm": needs a worker in a process of its own; set rollout.workers = 1, or '
    'rollout.engine = "embedded"'
)


@pytest.mark.parametrize(
    "words, told",
    [
        ([], ONE_PROCESS),
        (
            ["--rollout.workers=2", "--engine.url=http://there:8000"],
            'engine.url = "http://there:8000": one server serves only one worker, but rollout.workers = 2; set '
            "rollout.workers = 1, or leave out engine.url so that each worker starts its own server",
        ),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_what_its_processes_cannot_be_is_refused(words, told, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--rollout.engine", "vllm", *words, *more]) == 2
    assert capsys.readouterr().err == f"offbeat: {told}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "rollout, told",
    [({}, ONE_PROCESS), ({"workers": 2}, 'engine.url = "http://there:8000": one server serves only one worker')],
)
def test_from_python_it_is_refused_too(rollout, told, tmp_path):
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        offbeat.train(
            run={"dir": str(tmp_path)}, rollout={"engine": "vllm", **rollout}, engine={"url": "http://there:8000"}
        )
    assert list(tmp_path.iterdir()) == []


def test_a_worker_given_a_server_for_an_engine_that_has_none_is_told_what_to_add():
    with pytest.raises(
        UserError, match=r'^--engine\.url = "http://there:8000": .*; set rollout\.engine to "vllm" or "sglang"'
    ):
        load(None, ["--engine.url=http://there:8000"])  # what `offbeat worker --engine-url` adds
