import os

import pytest
import torch

from offbeat.errors import UserError
from offbeat.model import devices


def test_auto_takes_the_best_device_there_is():
    assert str(devices.pick_device("auto")) == devices.available_devices()[0]


def test_cpu_is_always_there_and_has_a_name():
    assert devices.pick_device("cpu") == torch.device("cpu")
    assert devices.device_name(torch.device("cpu"))


@pytest.mark.parametrize("name", ["cuda:99", "mps:1", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_what_is(name):
    with pytest.raises(UserError, match=r"this machine has only .*cpu"):
        devices.pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "tpu", ""])
def test_a_name_that_is_no_device_is_refused_with_what_is_allowed(name):
    with pytest.raises(UserError, match="must be auto, cpu, cuda, cuda:N or mps"):
        devices.pick_device(name)


def test_auto_dtype_is_bfloat16_on_a_gpu_only():
    assert devices.pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert devices.pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert devices.pick_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
    with pytest.raises(UserError, match="float32, bfloat16"):
        devices.pick_dtype("float16", torch.device("cpu"))


def test_cpu_needs_no_waiting_and_counts_no_memory():
    cpu = torch.device("cpu")
    devices.synchronize(cpu)
    devices.empty_cache(cpu)
    assert devices.memory_bytes(cpu) is None


def test_the_memory_of_a_gpu_is_free_and_total(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    assert devices.memory_bytes(torch.device("cuda")) == (10, 80)
    assert devices.memory_bytes(torch.device("cpu")) is None


@pytest.mark.parametrize(("num_bytes", "share"), [(20, 0.25), (0, 0.0), (100, 1.0)])
def test_a_limit_is_a_share_of_the_whole_card(monkeypatch, num_bytes, share):
    found = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: found.append(given))
    devices.limit_memory(torch.device("cuda:0"), num_bytes)
    devices.limit_memory(torch.device("cpu"), num_bytes)
    assert found == [(share, torch.device("cuda:0"))]


def test_memory_grows_in_place_unless_the_environment_says_otherwise(monkeypatch):
    first, second = devices.ALLOCATOR_VARIABLES
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(second, "max_split_size_mb:64")
    monkeypatch.setenv(first, "")
    monkeypatch.delenv(first)
    devices.avoid_fragments(torch.device("cuda"))
    assert first not in os.environ
    monkeypatch.delenv(second)
    devices.avoid_fragments(torch.device("cpu"))
    assert first not in os.environ
    devices.avoid_fragments(torch.device("cuda"))
    assert os.environ[first] == "expandable_segments:True"


def test_auto_takes_a_gpu_before_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "available_devices", lambda: ["cuda:0", "cuda:1", "cpu"])
    assert devices.pick_device("auto") == torch.device("cuda:0")


@pytest.mark.parametrize(("kind", "workspace"), [("cuda", ":4096:8"), ("cpu", None)])
def test_equal_bits_on_a_gpu_need_a_fixed_workspace_and_deterministic_kernels(kind, workspace, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        devices.be_deterministic(torch.device(kind))
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
        assert torch.are_deterministic_algorithms_enabled() == (kind == "cuda")
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(False)
