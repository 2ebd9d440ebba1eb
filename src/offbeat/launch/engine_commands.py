"""How each engine's server is started: its command line and its environment, from the configuration and from what the
engine's own interpreter finds on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.model.loading import resolve
from offbeat.rollout.engines.sglang import INSIDE_FOLDER, LAUNCHER
from offbeat.rollout.engines.vllm import EXTENSION, EXTENSION_FOLDER, ON_CPU_FOLDER, WHOLE_PROMPTS
from offbeat.rollout.engines.vllm_lora import ALLOW, NUM_KEPT, RANKS, server_rank

SERVED_NAME = "offbeat"
STREAM_TOKENS = 32
"""Tokens in one event of an answer: fewer cost the server more than the tokens do."""
CPU_KV_GB = "2"
"""Of keys and values on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise; its own default is a large part of memory,
which trainer and coordinator want too."""
SGLANG_OWN_TOKENS = 6
"""What it keeps of the context for itself."""
LOOK = """\
import importlib.util, json, sys
has = importlib.util.find_spec(sys.argv[1]) is not None
gpus = 0
if has:
    import torch
    gpus = torch.cuda.device_count()
print(json.dumps({"has": has, "gpus": gpus}))
"""
LOOK_WITHIN_S = 300.0
"""Importing torch takes long on a busy machine, or from a network's disk."""
UNWANTED = ("PYTHONPATH", "PYTHONHOME", "SGLANG_RETURN_ORIGINAL_LOGPROB")
"""The first would hide the packages of the engine's environment; the last would have log-probs before temperature."""


@dataclass(frozen=True)
class Machine:
    """What the engine's interpreter can use here."""

    python: str
    num_gpus: int


async def look_around(config: Config, environment: Mapping[str, str]) -> Machine:
    """Asks the interpreter that is to run the engine; refuses one that cannot."""
    engine, told = config.rollout.engine, config.engine.python
    python = str(Path(told).expanduser()) if told else sys.executable
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", LOOK, engine),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise UserError(f'engine.python = "{python}": {error.strerror}; name the Python that has {engine}') from error
    try:
        printed, errors = await asyncio.wait_for(process.communicate(), LOOK_WITHIN_S)
    except TimeoutError as error:
        raise UserError(f'engine.python = "{python}": did not import torch within {LOOK_WITHIN_S:g} s') from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f'engine.python = "{python}": cannot be used: {last}')
    found = json.loads(printed)
    if not found["has"]:
        raise UserError(
            f'rollout.engine = "{engine}": {python} has no package {engine}; install it there, or name the Python of '
            "an environment that has it by engine.python"
        )
    return Machine(python, found["gpus"])


def environment(config: Config, ours: Mapping[str, str]) -> dict[str, str]:
    """What a server, or whoever looks for it, is to see: ours, without secrets and without what would mislead it."""
    kept = {name: value for name, value in ours.items() if name not in UNWANTED and not name.startswith("OFFBEAT_")}
    # No reports about its use to anyone.
    kept.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    # Control calls for whoever reaches the server, and pickled handles of GPU memory: nobody else can (`engine_doors`).
    kept.update(VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    kept.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GB)
    if config.model.lora_rank:
        kept[ALLOW] = "1"
    kept["PYTHONPATH"] = str(INSIDE_FOLDER if config.rollout.engine == "sglang" else EXTENSION_FOLDER)
    # A float32 is one: attention in tf32 would put log-probs off by hundredths.
    kept.setdefault("TRITON_F32_DEFAULT", "ieee")
    # What it keeps of the context for itself may pass the model's own length.
    kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    kind, _, index = config.model.device.partition(":")
    if kind == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda" and index:
        kept["CUDA_VISIBLE_DEVICES"] = _devices(int(index), config.engine.tensor_parallel, ours)
    return kept


def suited(environment: Mapping[str, str], machine: Machine) -> dict[str, str]:
    """The same, for a server on this machine: where there is no GPU, its processes share the cores with their
    callers."""
    if machine.num_gpus:
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(ON_CPU_FOLDER)))}


def _devices(first: int, count: int, ours: Mapping[str, str]) -> str:
    """GPUs from the named one on, by the names that they have outside."""
    seen = [name for name in ours.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    numbers = range(first, first + count)
    if seen and numbers[-1] >= len(seen):
        raise UserError(f'model.device = "cuda:{first}": CUDA_VISIBLE_DEVICES = {",".join(seen)} has no {numbers[-1]}')
    return ",".join(seen[number] if seen else str(number) for number in numbers)


def uses_ipc(config: Config, machine: Machine, *, sees_gpu: bool) -> bool:
    """Whether versions go into a server by way of a GPU's memory; `sees_gpu` says whether this process can use it."""
    told = config.engine.weights
    why = {
        f'rollout.engine = "{config.rollout.engine}" takes files': config.rollout.engine != "vllm",
        f"model.lora_rank = {config.model.lora_rank}": config.model.lora_rank > 0,  # adapters are read from files
        "there is no GPU": not machine.num_gpus or not sees_gpu,
        f"engine.tensor_parallel = {config.engine.tensor_parallel}": config.engine.tensor_parallel > 1,
    }
    hindrance = next((reason for reason, holds in why.items() if holds), None)
    if told == "ipc" and hindrance:
        raise UserError(f'engine.weights = "ipc": allowed "auto", "path" here, because {hindrance}')
    return told != "path" and hindrance is None


def command(config: Config, machine: Machine, listen: Sequence[str], *, ipc: bool = False) -> list[str]:
    """The command line that starts the engine's server; `listen` says where (`engine_doors`)."""
    words = _vllm(config, machine, ipc) if config.rollout.engine == "vllm" else _sglang(config, machine)
    return [machine.python, *words, *config.engine.arguments, *listen]


def _vllm(config: Config, machine: Machine, ipc: bool) -> list[str]:
    words = {
        "--model": str(resolve(config.model.path)),
        "--served-model-name": SERVED_NAME,
        "--worker-extension-cls": EXTENSION,
        "--dtype": _dtype(config, machine),
        "--max-model-len": str(_context(config)),
        "--max-num-seqs": str(config.rollout.slots),
        "--tensor-parallel-size": str(config.engine.tensor_parallel),
        "--logprobs-mode": "processed_logprobs",
        "--stream-interval": str(STREAM_TOKENS),
        "--generation-config": "vllm",
        "--seed": str(config.run.seed),
    }
    if machine.num_gpus:
        words["--gpu-memory-utilization"] = f"{config.engine.memory_share:g}"
    if ipc:
        words["--weight-transfer-config"] = json.dumps({"backend": "ipc"})
    words.update(_lora(config, machine))
    # Token ids in and out and no tokenizer: text would cost the server time, and nobody reads it.
    switches = ["--tokens-only", "--disable-uvicorn-access-log", *(["--enable-lora"] if config.model.lora_rank else [])]
    if not machine.num_gpus:
        switches.append(WHOLE_PROMPTS)
    return ["-m", "vllm.entrypoints.openai.api_server", *_flat(words), *switches]


def _lora(config: Config, machine: Machine) -> dict[str, str]:
    rank = config.model.lora_rank
    if not rank:
        return {}
    if (largest := server_rank(rank)) is None:
        raise UserError(f'model.lora_rank = {rank}: allowed up to {RANKS[-1]} with rollout.engine = "vllm"')
    if machine.num_gpus and _dtype(config, machine) == "float32":
        raise UserError('model.dtype = "float32": allowed "bfloat16" where vLLM on a GPU serves adapters')
    # One answers at a time.
    return {"--max-lora-rank": str(largest), "--max-loras": "1", "--max-cpu-loras": str(NUM_KEPT)}


def _sglang(config: Config, machine: Machine) -> list[str]:
    words = {
        "--model-path": str(resolve(config.model.path)),
        "--dtype": _dtype(config, machine),
        "--context-length": str(_context(config) + SGLANG_OWN_TOKENS),
        "--max-running-requests": str(config.rollout.slots),
        "--tp-size": str(config.engine.tensor_parallel),
        "--mem-fraction-static": f"{config.engine.memory_share:g}",
        "--stream-interval": str(STREAM_TOKENS),
        "--random-seed": str(config.run.seed),
        "--log-level-http": "warning",
    }
    if not machine.num_gpus:
        words["--device"] = "cpu"
    # Seeds count only in deterministic inference. A pause between two steps, which kept keys and values want, needs
    # steps that do not overlap.
    switches = ["--skip-tokenizer-init", "--incremental-streaming-output", "--enable-deterministic-inference"]
    if config.rollout.kv == "stale":
        switches.append("--disable-overlap-schedule")
    return ["-m", LAUNCHER, *_flat(words), *switches]


def _flat(words: Mapping[str, str]) -> Sequence[str]:
    return [word for pair in words.items() for word in pair]


def _dtype(config: Config, machine: Machine) -> str:
    """As the embedded engine chooses: bfloat16 is slow on a CPU."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if machine.num_gpus else "float32"


def _context(config: Config) -> int:
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
