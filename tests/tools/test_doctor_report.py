"""Findings of `offbeat doctor` about machines other than this one."""

from __future__ import annotations

import asyncio
import importlib.metadata
import tomllib
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.config import load
from offbeat.engines.dialect import Facts
from offbeat.engines.protocol import KvMode
from offbeat.tools.doctor import checks, probes
from offbeat.tools.doctor.checks import EXTRAS, check_limits, check_model, check_packages, check_ports, examine
from offbeat.tools.doctor.probes import check_device, check_disk, check_memory, compare_server, training_bytes
from offbeat.tools.doctor.report import DoctorReport, Finding, Level

GB = 10**9
Usage = namedtuple("Usage", "total used free")
URL = "http://127.0.0.1:8000"
SERVER = Facts("vllm 0.32.0", "bfloat16", 4096, True, True, frozenset({KvMode.REFILL, KvMode.SAME}))
SERVED = ("--rollout.engine=vllm", "--rollout.workers=1")


def config(*overrides: str):
    return load(None, overrides)


def only_ailment(findings) -> Finding:
    (found,) = [finding for finding in findings if finding.level in (Level.WARNS, Level.STOPS)]
    return found


def ailments(findings) -> list[Finding]:
    return [finding for finding in findings if finding.level in (Level.WARNS, Level.STOPS)]


@pytest.mark.parametrize("limit, text", [(256, "at most 256"), (-1, "no limit"), (2**63, "no limit")])
def test_few_open_files_are_a_warning(monkeypatch, limit, text):
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (limit, limit))
    found = next(check_limits(starts_server=False))
    assert (found.text, found.remedy) == (text, "ulimit -n 4096" if limit == 256 else "")


def test_shared_memory_matters_to_an_engine_that_is_started_here_alone(monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: Usage(64 * 10**6, 0, 64 * 10**6))
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (4096, 4096))
    assert only_ailment(check_limits(starts_server=True)).remedy.endswith("--shm-size 8g")
    assert ailments(check_limits(starts_server=False)) == []


def test_a_small_a_slow_and_a_network_disk_are_findings(monkeypatch, tmp_path):
    wanted = config(f"--run.dir={tmp_path}")
    assert ailments(check_disk(wanted, "", 10**6)) == [] or probes._fsync_s(tmp_path) > 0.01
    monkeypatch.setattr(probes, "_fsync_s", lambda _: 0.2)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda _: Usage(GB, 0, 10**6))
    monkeypatch.setattr("offbeat.ledger.database.network_file_system", lambda _: "nfs4")
    space, network, fsync = check_disk(wanted, "", 10**6)
    assert (space.level, "1.0 MB free" in space.text, "--run.dir" in space.remedy) == (Level.WARNS, True, True)
    assert (network.level, "nfs4" in network.text, "local disk" in network.remedy) == (Level.STOPS, True, True)
    assert (fsync.level, fsync.text) == (Level.WARNS, "200.0 ms; every acknowledgement waits for it")


def test_a_broken_device_stops_the_run_only_where_it_is_wanted(monkeypatch):
    import torch

    def fail(_):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr("offbeat.model.devices.memory_bytes", fail)
    for is_used, level in ((True, Level.STOPS), (False, Level.WARNS)):
        found = only_ailment(check_device(torch.device("cpu"), is_used=is_used))
        assert (found.about, found.level) == ("cpu", level)
        assert found.text.endswith("cannot be used: no kernel image is available")


def test_devices_that_are_missing_are_findings(monkeypatch, tmp_path):
    monkeypatch.setattr("offbeat.model.devices.available_devices", lambda: ["cpu"])
    monkeypatch.setattr(probes, "DRIVERS", {"CUDA": tmp_path})
    found = only_ailment(probes.check_torch(config(), "", 0))
    assert (found.level, "sees no GPU" in found.text, "build for CUDA" in found.remedy) == (Level.WARNS, True, True)
    monkeypatch.setattr(probes, "DRIVERS", {})
    found = only_ailment(probes.check_torch(config("--model.device=cuda:7"), "", 0))
    assert (found.about, found.level, found.remedy) == ("device", Level.STOPS, "--model.device cpu")
    found = only_ailment(probes.check_torch(config(*SERVED, "--engine.tensor-parallel=2"), "", 0))
    assert (found.level, found.remedy) == (Level.STOPS, "--engine.tensor-parallel 1")


def installed(monkeypatch, **versions: str | None) -> None:
    """Makes packages look installed in these versions, or not at all."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions.get(name, real(name) if name not in versions else None)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_packages_of_the_wrong_version_stop_the_run_with_the_command_that_repairs_it(monkeypatch):
    installed(monkeypatch, torch="2.9.0")
    found = only_ailment(check_packages(config()))
    assert (found.about, found.level, found.remedy) == ("torch", Level.STOPS, "pip install 'torch<2.14,>=2.11'")
    assert "2.9.0 is installed" in found.text


@pytest.mark.parametrize(
    "extra, package, words",
    [
        ("gym", "reasoning-gym", ["--task.source=reasoning-gym", "--task.name=chain_sum"]),
        ("math", "math-verify", ["--task.reward=math"]),
        ("data", "pyarrow", ["--task.source=file", "--task.path=rows.parquet"]),
        ("lora", "peft", ["--model.lora-rank=4"]),
        ("wandb", "wandb", ["--log.sinks=wandb"]),
        ("remote", "fsspec", ["--weights.store=gs://bucket/run"]),
    ],
)
def test_a_missing_extra_stops_the_run_that_needs_it_and_no_other(monkeypatch, extra, package, words):
    installed(monkeypatch, **{package: None, "gcsfs": "1"})
    assert ailments(check_packages(config())) == []
    found = only_ailment(check_packages(config(*words)))
    assert (found.level, found.remedy) == (Level.STOPS, f"pip install 'offbeat[{extra}]'")


def test_a_store_needs_its_own_package(monkeypatch):
    installed(monkeypatch, s3fs=None)
    assert only_ailment(check_packages(config("--ledger.backup=s3://b/r"))).remedy == "pip install s3fs"


def test_every_extra_has_a_purpose():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"all", "dev", "docs"}


def test_an_engine_that_is_not_installed_stops_the_run_that_wants_it():
    found = checks._engine("sglang", None, "/p", is_wanted=True)
    assert found.level is Level.STOPS
    assert found.remedy.endswith("bin/pip install sglang, then --engine.python ~/sglang/bin/python")
    assert checks._engine("sglang", None, "/p", is_wanted=False).level is Level.ABSENT


@pytest.mark.parametrize("version, is_old", [("0.9.2", True), ("0.25.1", True), ("0.26.0", False), ("1.0", False)])
def test_an_engine_too_old_to_be_known_is_a_warning(version, is_old):
    assert bool(ailments([checks._engine("vllm", version, "/p", is_wanted=True)])) is is_old


def test_a_server_must_be_what_the_configuration_says():
    sglang = config("--rollout.engine=sglang", "--rollout.workers=1", f"--engine.url={URL}")
    assert only_ailment(compare_server(sglang, URL, SERVER)).remedy == "--rollout.engine vllm"
    vllm = config(*SERVED, f"--engine.url={URL}")
    found = only_ailment(compare_server(vllm, URL, replace(SERVER, max_context_tokens=90)))
    assert (found.level, "start the server for 96 tokens" in found.remedy) == (Level.STOPS, True)
    texts = [f.text for f in compare_server(vllm, URL, replace(SERVER, has_spans=False))]
    assert any("known for each call, so that a load interrupts all calls" in text for text in texts)
    raw = replace(SERVER, is_tempered=False)
    assert ailments(compare_server(vllm, URL, raw)) == []
    cooler = config(*SERVED, f"--engine.url={URL}", "--rollout.temperature=0.7")
    assert only_ailment(compare_server(cooler, URL, raw)).level is Level.STOPS


def test_a_server_must_be_able_to_keep_kv_where_that_is_asked():
    stale = config(*SERVED, f"--engine.url={URL}", "--schedule.mode=overlap", "--rollout.kv=stale")
    found = only_ailment(compare_server(stale, URL, SERVER))
    assert (found.level, found.remedy) == (Level.STOPS, "--rollout.kv same")
    assert ailments(compare_server(stale, URL, replace(SERVER, kv_modes=frozenset(KvMode)))) == []


def test_loopback_is_needed_only_by_a_run_of_several_processes(monkeypatch):
    monkeypatch.setattr(checks, "_listen", lambda host, port: "Operation not permitted")
    assert only_ailment(check_ports(config())).level is Level.WARNS
    assert only_ailment(check_ports(config("--rollout.workers=1"))).level is Level.STOPS


def test_a_model_of_the_hub_may_come_later_and_a_folder_may_not(monkeypatch):
    monkeypatch.setattr(checks, "num_parameters", lambda _: 600_000_000)
    found, size = check_model("Qwen/Qwen3-0.6B")
    assert (found.level, found.remedy, size) == (Level.WARNS, "hf download Qwen/Qwen3-0.6B", 600_000_000)
    monkeypatch.undo()
    assert check_model("nowhere")[0].level is Level.STOPS


def test_a_model_that_is_neither_here_nor_to_be_had_stops_the_run(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found, size = check_model("Qwen/Qwen3-0.6B")
    assert (found.level, size) == (Level.STOPS, 0)
    assert "the Hugging Face hub cannot be reached to download it; check the network" in found.text


def test_memory_that_training_takes_is_worked_out():
    num = 7 * 10**9
    # bfloat16 on a GPU: 16 bytes of masters, moments and gradients, the policy's weights and the engine's.
    parts = training_bytes(config(), num, on_gpu=True)
    assert parts == {"weights": 6 * num, "optimizer": 8 * num, "gradients": 4 * num, "engine": 2 * num}
    assert sum(training_bytes(config(), num, on_gpu=False).values()) == 20 * num  # float32: 16 and the engine's own 4
    assert sum(training_bytes(config("--loss.kl-coef=0.1"), num, on_gpu=True).values()) == 22 * num
    found = check_memory(config(), num, "cuda:0", 139 * GB, 140 * GB, starts_server=False)
    assert (found.level, "at least 140.0 GB on cuda:0" in found.text) == (Level.WARNS, True)
    found = check_memory(config(), 8 * 10**9, "cuda:0", 139 * GB, 140 * GB, starts_server=False)
    assert found.level is Level.STOPS
    found = check_memory(config(), num, "cpu", 20 * GB, 25 * GB, starts_server=False)
    assert (found.level, found.text.endswith("; it has 25.0 GB")) == (Level.STOPS, True)
    assert "weights 28.0 GB, optimizer 56.0 GB, gradients 28.0 GB, engine 28.0 GB" in found.text
    assert found.remedy.endswith("or --model.lora-rank 16")


def test_an_engine_on_the_same_gpu_leaves_less_to_train_with():
    def check(*words: str) -> Finding:
        return check_memory(config(*SERVED, *words), 2 * 10**9, "cuda:0", 139 * GB, 140 * GB, starts_server=True)

    most = check("--engine.memory-share=0.85")
    assert "the engine leaves 21.0 GB" in most.text
    assert most.remedy.startswith("--engine.memory-share 0.61")
    assert check("--engine.memory-share=0.6").level is check().level is Level.FINE


def test_a_report_names_no_home_and_no_password_and_stops_come_first():
    findings = [
        Finding("offbeat", "0.1.0, in /home/ann/offbeat"),
        Finding("open files", "at most 256", Level.WARNS, "ulimit -n 4096"),
        Finding("server", "http://ann:secret@127.0.0.1:8000: no answer", Level.STOPS),
        Finding("vllm", "not installed", Level.ABSENT, "pip install vllm"),
    ]
    report = DoctorReport("run.toml", "offbeat train run.toml", findings)
    lines = report.lines("/home/ann")
    assert not report.can_run
    assert "offbeat train run.toml" not in report.works
    assert [change.split(":")[0] for change in report.changes] == ["server", "open files"]
    assert "- vllm        not installed; pip install vllm" in lines
    assert lines[-1] == "run.toml cannot run here"
    assert "in ~/offbeat" in "\n".join(lines)
    assert not any("/home/ann" in line or "secret" in line for line in lines)


def test_every_probe_that_fails_is_a_line_and_the_rest_stands(monkeypatch):
    async def fail(*_, **__):
        raise checks.ProbeFailed("no answer within 3 s")

    monkeypatch.setattr(checks, "ask", fail)
    report = asyncio.run(examine(config(), "the demo", "offbeat train", URL, [], 3.0))
    failed = {finding.about for finding in report.findings if finding.text == "no answer within 3 s"}
    assert failed == {"torch", "disk", "server", "engines", "run"}
    assert {finding.about for finding in report.findings} >= {"offbeat", "packages", "ports", "model"}
    assert not report.can_run
