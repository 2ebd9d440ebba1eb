"""How a run that trains adapters starts its engines' servers, and what it refuses before one is started."""

import asyncio

import pytest
from test_engine_commands import CPU, GPU, configured, options

from offbeat.engines.process.commands import command, uses_ipc
from offbeat.engines.process.lifecycle import ServerEngines
from offbeat.errors import UserError


def test_a_server_is_started_for_adapters_of_the_runs_rank():
    config = configured(model__lora_rank=12)
    told = options(command(config, GPU, ()))
    assert told["--enable-lora"] == ""
    assert (told["--max-lora-rank"], told["--max-loras"], told["--max-cpu-loras"]) == ("16", "1", "2")


def test_without_adapters_a_server_takes_none():
    assert not [word for word in command(configured(), GPU, ()) if "lora" in word]


@pytest.mark.parametrize(
    ("keys", "machine", "told"),
    [
        ({"model__lora_rank": 600}, CPU, 'model.lora_rank = 600: must be at most 512 with rollout.engine = "vllm"'),
        ({"model__dtype": "float32"}, GPU, 'model.dtype = "float32" cannot be used with model.lora_rank = 8'),
    ],
)
def test_adapters_that_vllm_has_no_arithmetic_for_are_refused(keys, machine, told):
    with pytest.raises(UserError, match=told):
        command(configured(**{"model__lora_rank": 8, **keys}), machine, ())


def test_float32_is_what_adapters_are_served_in_on_a_cpu():
    assert options(command(configured(model__lora_rank=8), CPU, ()))["--dtype"] == "float32"


def test_adapters_never_go_by_way_of_a_gpus_memory():
    assert uses_ipc(configured(), GPU, sees_gpu=True)
    assert not uses_ipc(configured(model__lora_rank=8), GPU, sees_gpu=True)
    with pytest.raises(UserError, match=r'engine.weights = "ipc": .* because adapters \(model.lora_rank = 8\)'):
        uses_ipc(configured(model__lora_rank=8, engine__weights="ipc"), GPU, sees_gpu=True)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"rollout__kv": "stale", "schedule__mode": "overlap"}, r'rollout.kv = "stale" cannot be used'),
        ({"engine__weights": "ipc"}, r'engine.weights = "ipc" cannot be used'),
    ],
)
def test_what_no_server_with_adapters_could_do_is_refused_before_one_is_waited_for(tmp_path, keys, told):
    config = configured(model__lora_rank=8, engine__url="http://127.0.0.1:9", **keys)
    with pytest.raises(UserError, match=rf"{told} with model.lora_rank = 8"):
        asyncio.run(asyncio.wait_for(ServerEngines(config, "w", tmp_path).open(), 10))
