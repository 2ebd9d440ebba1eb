"""What an engine's server is started with, by its configuration and what its interpreter finds."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.config import from_dict
from offbeat.engines.process.commands import EngineMachine, command, environment, probe_interpreter, suited, uses_ipc
from offbeat.errors import UserError
from offbeat.model.loading import TINY_FOLDER

SOCKET, PORT = ("--socket", "/private/engine"), ("--host", "127.0.0.1", "--port", "8123")
CPU, GPU = EngineMachine("/env/bin/python", 0, 0.5), EngineMachine("/env/bin/python", 2, 0.5)


def configured(**keys):
    return from_dict({"rollout": {"engine": "vllm"}}, {name.replace("__", "."): value for name, value in keys.items()})


def options(words: list[str]) -> dict[str, str]:
    """What follows each option; "" after a switch."""
    after = {word: following for word, following in zip(words, [*words[1:], "--"], strict=True) if word[:2] == "--"}
    return {word: "" if following.startswith("--") else following for word, following in after.items()}


def test_vllm_listens_at_a_socket_and_takes_tokens_alone():
    words = command(configured(rollout__slots=24, rollout__max_new_tokens=100, run__seed=7), CPU, SOCKET)
    assert words[:3] == ["/env/bin/python", "-m", "offbeat_vllm_process"]
    assert options(words) == {
        "--model": str(TINY_FOLDER),
        "--worker-extension-cls": "offbeat_in_vllm.Extension",
        "--dtype": "float32",
        "--max-model-len": "164",
        "--max-num-seqs": "24",
        "--tensor-parallel-size": "1",
        "--logprobs-mode": "processed_logprobs",
        "--stream-interval": "32",
        "--generation-config": "vllm",
        "--seed": "7",
        "--skip-tokenizer-init": "",
        "--no-enable-chunked-prefill": "",
        "--socket": "/private/engine",
    }


def test_on_a_gpu_it_is_told_its_share_of_memory_and_how_weights_come():
    config = configured(engine__tensor_parallel=2)
    told = options(command(config, GPU, SOCKET, ipc=True))
    assert (told["--dtype"], told["--gpu-memory-utilization"], told["--tensor-parallel-size"]) == (
        "bfloat16",
        "0.5",
        "2",
    )
    assert json.loads(told["--weight-transfer-config"]) == {"backend": "ipc"}
    assert "--weight-transfer-config" not in command(config, GPU, SOCKET)
    assert "--no-enable-chunked-prefill" not in told


def test_only_vllm_on_a_gpu_waits_for_the_lock_on_the_gpus_memory():
    told = options(command(configured(), GPU, SOCKET, memory_lock=Path("/run/gpu.lock")))
    assert told["--memory-lock"] == "/run/gpu.lock"
    for config, machine in ((configured(), CPU), (configured(rollout__engine="sglang"), GPU)):
        assert "--memory-lock" not in command(config, machine, SOCKET, memory_lock=Path("/run/gpu.lock"))


def test_sglang_is_started_as_its_dialect_wants_it():
    config = configured(rollout__engine="sglang", rollout__kv="stale", schedule__mode="overlap")
    words = command(config, GPU, PORT)
    assert words[:3] == ["/env/bin/python", "-m", "offbeat_in_sglang"]
    told = options(words)
    assert (told["--context-length"], told["--host"], told["--port"]) == ("102", "127.0.0.1", "8123")
    wanted = {"--skip-tokenizer-init", "--incremental-streaming-output", "--enable-deterministic-inference"}
    assert wanted | {"--disable-overlap-schedule"} <= told.keys()
    assert "--disable-overlap-schedule" not in command(configured(rollout__engine="sglang"), GPU, PORT)
    assert options(command(config, CPU, PORT))["--device"] == "cpu"


def test_a_users_own_words_win_except_over_where_it_listens():
    words = command(configured(engine__arguments=["--seed", "9", "--enforce-eager", "--host", "0.0.0.0"]), CPU, PORT)
    told = options(words)
    assert (told["--seed"], told["--host"], told["--port"]) == ("9", "127.0.0.1", "8123")
    assert "--enforce-eager" in told


def test_a_server_sees_no_secret_of_ours_and_none_of_our_packages():
    ours = {"PATH": "/bin", "OFFBEAT_TOKEN": "secret", "PYTHONPATH": "/ours", "VLLM_CPU_KVCACHE_SPACE": "5"}
    told = environment(configured(), ours)
    assert "OFFBEAT_TOKEN" not in told
    assert (Path(told["PYTHONPATH"]) / "offbeat_in_vllm.py").exists()
    assert "/ours" not in told["PYTHONPATH"]
    assert (told["PATH"], told["VLLM_CPU_KVCACHE_SPACE"], told["VLLM_NO_USAGE_STATS"]) == ("/bin", "5", "1")
    assert environment(configured(), {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in told


def test_without_a_gpu_the_servers_processes_give_way_to_others_while_they_wait():
    told = suited(configured(), environment(configured(), {}), CPU)
    asked = "import os; os.sched_yield(); print(os.sched_yield.__module__); import offbeat_in_vllm"
    said = subprocess.run([sys.executable, "-c", asked], env=told, capture_output=True, text=True, check=True)
    assert said.stdout == "sitecustomize\n"
    for config, machine in ((configured(), GPU), (configured(rollout__engine="sglang"), CPU)):
        assert suited(config, environment(config, {}), machine) == environment(config, {})


@pytest.mark.parametrize(
    "device, seen, told",
    [("cpu", "0,1", ""), ("cuda:1", None, "1,2"), ("cuda:1", "4,6,7", "6,7"), ("auto", "3", "3"), ("cuda", "3", "3")],
)
def test_it_is_given_the_named_gpu_and_those_after_it(device, seen, told):
    config = configured(model__device=device, engine__tensor_parallel=2)
    ours = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    assert environment(config, ours).get("CUDA_VISIBLE_DEVICES") == told


def test_more_gpus_than_may_be_seen_are_refused():
    with pytest.raises(UserError, match=r'^model\.device = "cuda:1": CUDA_VISIBLE_DEVICES = 4,5 lists only 2 GPUs'):
        environment(configured(model__device="cuda:1", engine__tensor_parallel=2), {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize(
    "keys, machine, sees_gpu, expected",
    [
        ({}, GPU, True, True),
        ({"engine__weights": "path"}, GPU, True, False),
        ({}, GPU, False, False),
        ({}, CPU, False, False),
        ({"engine__tensor_parallel": 2}, GPU, True, False),
        ({"rollout__engine": "sglang"}, GPU, True, False),
    ],
)
def test_weights_go_through_gpu_memory_where_that_can_be_done(keys, machine, sees_gpu, expected):
    assert uses_ipc(configured(**keys), machine, sees_gpu=sees_gpu) is expected


@pytest.mark.parametrize(
    "keys, machine, why",
    [
        ({}, CPU, "worker and engine do not both see a GPU"),
        ({"engine__tensor_parallel": 2}, GPU, "engine.tensor_parallel = 2 is above 1"),
        ({"rollout__engine": "sglang"}, GPU, 'rollout.engine = "sglang" reads weights from files'),
    ],
)
def test_asking_for_that_where_it_cannot_be_done_is_refused(keys, machine, why):
    with pytest.raises(UserError) as caught:
        uses_ipc(configured(engine__weights="ipc", **keys), machine, sees_gpu=machine is GPU)
    assert str(caught.value) == f'engine.weights = "ipc": not possible here, because {why}; set it to "auto" or "path"'


def test_an_interpreter_without_the_engine_is_refused_by_name():
    config = configured(engine__python=sys.executable, rollout__engine="sglang")
    with pytest.raises(
        UserError, match=r'^rollout\.engine = "sglang": .* has no package sglang; install it there, name'
    ):
        asyncio.run(probe_interpreter(config, os.environ))


@pytest.mark.parametrize(
    "python, why",
    [("/no/such/python", "No such file or directory"), ("/bin/false", "looking for .* in this Python failed: no out")],
)
def test_an_interpreter_that_is_none_is_refused_by_name(python, why):
    with pytest.raises(UserError, match=rf'^engine\.python = "{python}": {why}'):
        asyncio.run(probe_interpreter(configured(engine__python=python), os.environ))


def test_an_interpreter_tells_what_it_finds(tmp_path):
    cuda = "class cuda:\n    device_count = lambda: 3\n    mem_get_info = lambda number: (10, 400)\n"
    for name, text in {"vllm": "", "torch": cuda}.items():
        (tmp_path / f"{name}.py").write_text(text)

    def probed(share_of=None, **keys):
        return asyncio.run(probe_interpreter(configured(**keys), {"PYTHONPATH": str(tmp_path)}, share_of=share_of))

    assert probed() == EngineMachine(sys.executable, 3, 0.85)
    assert probed(engine__memory_share=0.5) == EngineMachine(sys.executable, 3, 0.5)
    assert probed(lambda num_bytes: num_bytes / 1000) == EngineMachine(sys.executable, 3, 0.4)
