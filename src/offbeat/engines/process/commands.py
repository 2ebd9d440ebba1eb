"""Builds the command line and environment of an engine's server from the configuration and a probe of the engine's
Python."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.config.schema import Config
from offbeat.engines.dialect import STREAM_TOKENS
from offbeat.engines.sglang.api import INSIDE_FOLDER, LAUNCHER
from offbeat.engines.vllm.api import EXTENSION, EXTENSION_FOLDER, ON_CPU_FOLDER, WHOLE_PROMPTS
from offbeat.engines.vllm.direct import MODULE
from offbeat.engines.vllm.lora import NUM_KEPT, RANKS, server_rank
from offbeat.errors import UserError
from offbeat.model.loading import resolve

CPU_KV_GB = "2"
"""Default of VLLM_CPU_KVCACHE_SPACE, in GB; vLLM's own default takes much of the memory that the trainer needs."""
SGLANG_OWN_TOKENS = 6
"""Tokens of the context length that SGLang reserves for itself."""
PROBE = """\
import importlib.util, json, sys
has = importlib.util.find_spec(sys.argv[1]) is not None
gpus = bytes = 0
if has and sys.argv[2] == "gpus":
    import torch
    gpus = torch.cuda.device_count()
    bytes = torch.cuda.mem_get_info(0)[1] if gpus else 0
print(json.dumps({"has": has, "gpus": gpus, "bytes": bytes}))
"""
PROBE_WITHIN_S = 300.0
"""Deadline of the probe; importing torch takes long on a busy machine or a network disk."""
UNWANTED = ("PYTHONPATH", "PYTHONHOME", "SGLANG_RETURN_ORIGINAL_LOGPROB")
"""Variables not passed to a server: the first two would hide the packages of the engine's environment, and the last
makes SGLang return log-probs before temperature."""


@dataclass(frozen=True)
class EngineMachine:
    """Path of the engine's Python interpreter, the number of GPUs that this interpreter sees, and the share of each
    GPU's memory that the server may take."""

    python: str
    num_gpus: int
    memory_share: float


async def probe_interpreter(
    config: Config,
    environment: Mapping[str, str],
    *,
    counts_gpus: bool = True,
    share_of: Callable[[int], float] | None = None,
) -> EngineMachine:
    """Runs the engine's interpreter, with the variables in `environment`, to count the GPUs that it sees. Raises a
    `UserError` if it cannot run or lacks the engine's package. Without `counts_gpus`, reports 0 GPUs and does not
    import torch, which takes long. `share_of` takes the bytes of a GPU's memory and returns the share of it that the
    server may take. If `share_of` is None, engine.memory_share decides, on the assumption that nothing else uses the
    GPU."""
    engine, python = config.rollout.engine, sys.executable
    if config.engine.python:
        python = str(Path(config.engine.python).expanduser())
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", PROBE, engine, "gpus" if counts_gpus else ""),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise UserError(f'engine.python = "{python}": {error.strerror}; name a Python that has {engine}') from error
    try:
        printed, errors = await asyncio.wait_for(process.communicate(), PROBE_WITHIN_S)
    except TimeoutError as error:
        raise UserError(
            f'engine.python = "{python}": this Python took over {PROBE_WITHIN_S:g} s to look for {engine}; start again '
            "when its machine and disk are less busy"
        ) from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise UserError(f'engine.python = "{python}": looking for {engine} in this Python failed: {last}')
    found = json.loads(printed)
    if not found["has"]:
        raise UserError(
            f'rollout.engine = "{engine}": {python} has no package {engine}; install it there, name the Python of an '
            "environment that has it with --engine.python, or use --rollout.engine embedded"
        )
    share = share_of(found["bytes"]) if share_of and found["gpus"] else config.engine.assumed_share
    return EngineMachine(python, found["gpus"], share)


def environment(config: Config, ours: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for a server: those of this process (`ours`), without Offbeat's own
    (OFFBEAT_...) and `UNWANTED`, and with those that the server needs."""
    kept = {name: value for name, value in ours.items() if name not in UNWANTED and not name.startswith("OFFBEAT_")}
    # These turn usage reports off.
    kept.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    # This allows pickled handles of GPU memory. That is safe because only this user can reach the process
    # (`process.endpoints`).
    kept.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    kept.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GB)
    kept["PYTHONPATH"] = str(INSIDE_FOLDER if config.rollout.engine == "sglang" else EXTENSION_FOLDER)
    # With tf32 in attention, float32 log-probs would be off by hundredths.
    kept.setdefault("TRITON_F32_DEFAULT", "ieee")
    # With SGLANG_OWN_TOKENS added, the context may be longer than the model's own.
    kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    kind, _, index = config.model.device.partition(":")
    if kind == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda" and index:
        kept["CUDA_VISIBLE_DEVICES"] = _devices(int(index), config.engine.tensor_parallel, ours)
    return kept


def suited(config: Config, environment: Mapping[str, str], machine: EngineMachine) -> dict[str, str]:
    """Returns `environment`; for vLLM without a GPU, its PYTHONPATH also gets the folder of workarounds for CPUs."""
    if machine.num_gpus or config.rollout.engine != "vllm":
        return dict(environment)
    return {**environment, "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(ON_CPU_FOLDER)))}


def _devices(first: int, count: int, ours: Mapping[str, str]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for `count` GPUs from number `first` on. The numbers are indices into the variable's
    list in `ours` (this process's environment) or, if it is not set there, into all GPUs of the machine."""
    seen = [name for name in ours.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    numbers = range(first, first + count)
    if seen and numbers[-1] >= len(seen):
        raise UserError(
            f'model.device = "cuda:{first}": CUDA_VISIBLE_DEVICES = {",".join(seen)} lists only {len(seen)} GPUs, but '
            f"number {numbers[-1]} (counted from 0) is needed; list more GPUs there, or use fewer"
        )
    return ",".join(seen[number] if seen else str(number) for number in numbers)


def uses_ipc(config: Config, machine: EngineMachine, *, sees_gpu: bool) -> bool:
    """Whether the server gets weights through GPU memory instead of files. Raises a `UserError` if the configuration
    demands it (engine.weights = "ipc") where it is impossible. `sees_gpu` says whether this process can use a GPU."""
    wanted = config.engine.weights
    why = {
        f'rollout.engine = "{config.rollout.engine}" reads weights from files': config.rollout.engine != "vllm",
        f"adapters (model.lora_rank = {config.model.lora_rank}) are read from files": config.model.lora_rank > 0,
        "worker and engine do not both see a GPU": not machine.num_gpus or not sees_gpu,
        f"engine.tensor_parallel = {config.engine.tensor_parallel} is above 1": config.engine.tensor_parallel > 1,
    }
    obstacle = next((reason for reason, holds in why.items() if holds), None)
    if wanted == "ipc" and obstacle:
        raise UserError(f'engine.weights = "ipc": not possible here, because {obstacle}; set it to "auto" or "path"')
    return wanted != "path" and obstacle is None


def command(
    config: Config,
    machine: EngineMachine,
    listen: Sequence[str],
    *,
    ipc: bool = False,
    memory_lock: Path | None = None,
) -> list[str]:
    """Returns the command line of the engine's process. `listen` holds the options that say where it listens; with
    `ipc`, vLLM is started to take weights through GPU memory. On a GPU, vLLM locks the file `memory_lock` (None: no
    file) while it takes its memory."""
    words = _vllm(config, machine, ipc, memory_lock) if config.rollout.engine == "vllm" else _sglang(config, machine)
    return [machine.python, *words, *config.engine.arguments, *listen]


def _vllm(config: Config, machine: EngineMachine, ipc: bool, memory_lock: Path | None) -> list[str]:
    words = {
        "--model": str(resolve(config.model.path)),
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
        words["--gpu-memory-utilization"] = f"{machine.memory_share:g}"
        if memory_lock is not None:
            words["--memory-lock"] = str(memory_lock.absolute())
    if ipc:
        words["--weight-transfer-config"] = json.dumps({"backend": "ipc"})
    words.update(_lora(config, machine))
    switches = ["--skip-tokenizer-init", *(["--enable-lora"] if config.model.lora_rank else [])]
    if not machine.num_gpus:
        switches.append(WHOLE_PROMPTS)
    return ["-m", MODULE, *_flat(words), *switches]


def _lora(config: Config, machine: EngineMachine) -> dict[str, str]:
    rank = config.model.lora_rank
    if not rank:
        return {}
    if (largest := server_rank(rank)) is None:
        raise UserError(f'model.lora_rank = {rank}: must be at most {RANKS[-1]} with rollout.engine = "vllm"')
    if machine.num_gpus and _dtype(config, machine) == "float32":
        raise UserError(
            f'model.dtype = "float32" cannot be used with model.lora_rank = {rank} in vLLM on a GPU; set it to '
            '"bfloat16"'
        )
    # All calls use the same adapter, so one at a time is enough.
    return {"--max-lora-rank": str(largest), "--max-loras": "1", "--max-cpu-loras": str(NUM_KEPT)}


def _sglang(config: Config, machine: EngineMachine) -> list[str]:
    words = {
        "--model-path": str(resolve(config.model.path)),
        "--dtype": _dtype(config, machine),
        "--context-length": str(_context(config) + SGLANG_OWN_TOKENS),
        "--max-running-requests": str(config.rollout.slots),
        "--tp-size": str(config.engine.tensor_parallel),
        "--mem-fraction-static": f"{machine.memory_share:g}",
        "--stream-interval": str(STREAM_TOKENS),
        "--random-seed": str(config.run.seed),
        "--log-level-http": "warning",
    }
    if not machine.num_gpus:
        words["--device"] = "cpu"
    # The docstring of `sglang.api` explains these.
    switches = ["--skip-tokenizer-init", "--incremental-streaming-output", "--enable-deterministic-inference"]
    if config.rollout.kv == "stale":
        switches.append("--disable-overlap-schedule")
    return ["-m", LAUNCHER, *_flat(words), *switches]


def _flat(words: Mapping[str, str]) -> Sequence[str]:
    return [word for pair in words.items() for word in pair]


def _dtype(config: Config, machine: EngineMachine) -> str:
    """Returns the configured dtype; by default bfloat16, but float32 on a CPU, where bfloat16 is slow."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if machine.num_gpus else "float32"


def _context(config: Config) -> int:
    return config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
