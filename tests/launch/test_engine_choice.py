"""`rollout.engine = "auto"`: which engine a machine gets, and that a run keeps the one that it began with."""

import json
import sys

import pytest

import offbeat
from offbeat.cli.main import main
from offbeat.config import from_dict, load
from offbeat.launch import engine_choice
from offbeat.launch.engine_choice import Choice, choose, with_chosen_engine
from offbeat.launch.run_folder import RunFolder, check_resumable

ON_A_GPU = {"has_gpu": True, "has_vllm": lambda: True}


def must_not_look() -> bool:
    raise AssertionError("looked for vLLM although something else decides")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with the driver of a GPU, and an interpreter that takes itself for one with vLLM."""
    monkeypatch.setattr(engine_choice, "GPU_DRIVERS", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def vllm(gpu, monkeypatch):
    monkeypatch.setattr(engine_choice, "FIND_VLLM", "")


def test_a_gpu_and_vllm_make_vllm():
    assert choose(from_dict({}), **ON_A_GPU) == Choice("vllm", "there is a GPU here, and vLLM is installed")


def test_without_a_gpu_nothing_looks_for_vllm():
    assert choose(from_dict({}), has_gpu=False, has_vllm=must_not_look).told == "embedded: there is no GPU here"


def test_where_only_vllm_is_missing_the_choice_says_how_to_get_it():
    told = choose(from_dict({}), has_gpu=True, has_vllm=lambda: False).told
    assert told.startswith("embedded: vLLM is not installed here; vLLM is many times faster on a GPU: pip install vllm")


STALE = {"rollout.kv": "stale", "schedule.max_staleness": 1}


@pytest.mark.parametrize(
    "keys, why",
    [
        ({"run.exact": True}, "run.exact = true"),
        ({"model.device": "cpu"}, 'model.device = "cpu"'),
        ({"model.lora_rank": 8, "model.dtype": "float32"}, 'model.dtype = "float32" and model.lora_rank'),
        ({**STALE, "model.lora_rank": 8, "schedule.mode": "overlap"}, 'rollout.kv = "stale" and model.lora_rank'),
        (STALE, 'rollout.kv = "stale" and schedule.mode = "alternate"'),
    ],
)
def test_what_vllm_cannot_do_the_embedded_engine_does(keys, why):
    assert choose(from_dict({}, keys), has_gpu=True, has_vllm=must_not_look) == Choice(
        "embedded", f"vLLM cannot be used with {why}"
    )


def test_a_chosen_vllm_gets_a_worker_of_its_own(vllm):
    config, choice = with_chosen_engine(load(None, [f"--engine.python={sys.executable}"]))
    assert (config.rollout.engine, config.rollout.workers, choice.engine) == ("vllm", 1, "vllm")
    config, _ = with_chosen_engine(load(None, [f"--engine.python={sys.executable}", "--rollout.workers=3"]))
    assert config.rollout.workers == 3


def test_an_engine_that_is_named_is_not_chosen(vllm):
    given = load(None, ["--rollout.engine=embedded", f"--engine.python={sys.executable}"])
    assert with_chosen_engine(given) == (given, None)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_is_none(vllm, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert with_chosen_engine(load(None))[1].why == "there is no GPU here"


@pytest.mark.parametrize("python", ["/nowhere/python", None])
def test_a_python_without_vllm_or_none_at_all_makes_the_embedded_engine(gpu, python):
    config, choice = with_chosen_engine(from_dict({}, {"engine.python": python}))
    assert (config.rollout.engine, choice.why) == ("embedded", "vLLM is not installed here")


def test_a_dry_run_says_which_engine_and_why_and_lists_no_key_that_nobody_gave(capsys, monkeypatch):
    monkeypatch.setattr(engine_choice, "GPU_DRIVERS", ())
    assert main(["train", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "engine       embedded: there is no GPU here\n" in told
    assert "rollout.engine" not in told


@pytest.mark.full
def test_a_run_records_the_engine_and_goes_on_with_it_where_another_would_be_chosen(tmp_path, capsys, monkeypatch):
    words = [f"--run.dir={tmp_path}", "--run.name=a", "--run.steps=1", "--eval.every=0", "--batch.groups-per-step=2"]
    (tmp_path / "a.toml").write_text("")
    monkeypatch.setattr(engine_choice, "GPU_DRIVERS", ())
    assert main(["train", str(tmp_path / "a.toml"), *words]) == 0
    stored = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (stored["rollout"]["engine"], stored["rollout"]["workers"]) == ("embedded", None)
    monkeypatch.setattr(engine_choice, "GPU_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(engine_choice, "has_vllm", lambda python: True)
    assert main(["train", str(tmp_path / "a.toml"), "--resume", *words, "--run.steps=2"]) == 0
    assert len(offbeat.Run(tmp_path / "a").metrics) == 2
    assert "engine vllm" not in capsys.readouterr().out


def test_a_run_of_vllm_is_resumed_with_its_workers_from_a_file_that_names_neither(tmp_path):
    served = from_dict({}, {"run.dir": str(tmp_path), "rollout.engine": "vllm", "rollout.workers": 2})
    with RunFolder.create(served) as folder:
        path = folder.path
    again = check_resumable(path, from_dict({}, {"run.dir": str(tmp_path)}))
    assert (again.rollout.engine, again.rollout.workers) == ("vllm", 2)


def test_a_run_whose_workers_chose_for_themselves_may_go_on_with_any_engine(tmp_path):
    mixed = from_dict({}, {"run.dir": str(tmp_path)})
    with RunFolder.create(mixed) as folder:
        path = folder.path
    assert check_resumable(path, mixed).rollout.engine == "auto"
    assert check_resumable(path, from_dict(mixed.model_dump(), {"rollout.engine": "embedded"}))
