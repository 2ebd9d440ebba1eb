"""Checks that may hang or crash, each in a process of its own: torch, the disk, an engine's server.

`python -m offbeat.tools.doctor.probes NAME URL PARAMETERS` reads the configuration from standard input. It prints
findings as a line of JSON, or ends with status 1 and one line on standard error. NAME is the check, URL an engine's
server or empty, and PARAMETERS the model's number of parameters, 0 if unknown.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import extras
from offbeat.config import Config, from_dict
from offbeat.config.schema import SERVED
from offbeat.config.summary import disk_bytes, size
from offbeat.errors import OffbeatError, UserError
from offbeat.extras import hidden
from offbeat.host_memory import host_memory
from offbeat.launch.gpu_memory import server_share, training_bytes
from offbeat.tools.doctor.report import Finding, Level, judged

if TYPE_CHECKING:
    import torch

    from offbeat.engines.dialect import Dialect, Facts
    from offbeat.engines.http_calls import Server

DRIVERS = {"CUDA": Path("/proc/driver/nvidia/version"), "ROCm": Path("/dev/kfd")}
SIDE = 64
SLOW_FSYNC_S = 0.05
"""Flush time above which a disk counts as slow: every submission waits for a flush."""
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs, from 0.27 on with "
    "--enable-scale-out"
)


def check_torch(config: Config, url: str, parameters: int) -> Iterator[Finding]:
    """Imports torch, computes on every device, and compares the memory with the needs of the configured model."""
    import torch

    from offbeat.model.devices import available_devices, memory_bytes, pick_device

    names, picked = available_devices(), ""
    builds = {"MPS": torch.backends.mps.is_built(), "CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    yield Finding("torch", f"{torch.__version__}, built for {[*filter(builds.get, builds), 'CPU'][0]}")
    try:
        picked = str(pick_device(config.model.device))
    except UserError as error:
        yield Finding("device", str(error), Level.STOPS, f"--model.device {names[0]}")
    for name in names:
        yield from check_device(torch.device(name), is_used=name == picked)
    drivers = [kind for kind, file in DRIVERS.items() if file.exists()]
    if drivers and names == ["cpu"]:
        remedy = f"install torch's build for {drivers[0]} that suits the driver: https://pytorch.org/get-started"
        yield Finding("gpu", "a GPU driver is loaded, but this torch sees no GPU", Level.WARNS, remedy)
    starts_server, num_gpus = config.rollout.engine in SERVED and not url, sum("cuda" in name for name in names)
    if starts_server and config.engine.tensor_parallel > max(num_gpus, 1):
        text = f"engine.tensor_parallel = {config.engine.tensor_parallel}, but this machine has {num_gpus} GPUs"
        yield Finding("engine", text, Level.STOPS, f"--engine.tensor-parallel {max(num_gpus, 1)}")
    if picked and parameters:
        memory = memory_bytes(torch.device(picked)) or host_memory()
        yield check_memory(config, parameters, picked, *memory, starts_server=starts_server)


def check_device(device: torch.device, *, is_used: bool) -> Iterator[Finding]:
    """Computes on the device, because torch also lists devices for which its build has no kernels."""
    import torch

    from offbeat.model.devices import device_name, memory_bytes

    name = text = str(device)
    try:
        text = device_name(device)
        if memory := memory_bytes(device):
            text += f", {size(memory[0])} free of {size(memory[1])}"
        ones = torch.ones(SIDE, SIDE, dtype=torch.bfloat16 if device.type != "cpu" else torch.float32, device=device)
        fault = "" if bool((ones @ ones == SIDE).all()) else "a product of two matrices comes out wrong"
    except RuntimeError as error:  # torch raises it for all problems with a driver or device
        fault = str(error).strip().splitlines()[0]
    if fault:
        remedy = "install a build of torch that suits the device and its driver, or choose another --model.device"
        yield Finding(name, f"{text}, cannot be used: {fault}", Level.STOPS if is_used else Level.WARNS, remedy)
    elif device.type != "cpu":
        yield Finding(name, text, works=f"--model.device {name}: {text}")


def check_memory(
    config: Config, parameters: int, device: str, free: int, total: int, *, starts_server: bool
) -> Finding:
    """Checks that the device has enough memory for training, besides the memory that an engine's server there takes."""
    parts = training_bytes(config, parameters, on_gpu=device != "cpu")
    needed = sum(parts.values())
    left = int(total * (1 - server_share(config, total)))
    kinds = ", ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in parts.items())
    text = f"at least {size(needed)} on {device} ({kinds}), besides activations and KV"
    if starts_server and device.startswith("cuda") and needed > left:
        remedy = f"--engine.memory-share {max(0.1, 1 - 1.5 * needed / total):.2f}, or a device of its own"
        return Finding("training", f"{text}; the engine leaves {size(left)}", Level.WARNS, remedy)
    if needed > total:
        text += f"; it has {size(total)}"
    elif needed > free:
        text += f"; {size(free)} is free"
    remedy = "a smaller model, a larger device" + ("" if config.model.lora_rank else ", or --model.lora-rank 16")
    level = Level.STOPS if needed > total else Level.WARNS
    return judged("training", text, bad=needed > free, remedy=remedy, level=level)


def check_run(config: Config, url: str, parameters: int) -> Iterator[Finding]:
    """Makes the checks of `offbeat train --dry-run`: rows, prompt lengths, tokenizer, and a trial of each reward."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with hidden("torch"):
        from offbeat.launch.preflight import checking

        async def checked() -> tuple[list[str], list[str]]:
            async with checking(config) as found:
                return found.lines()[1:], [advice.text for advice in found.advice()]

        try:
            lines, warnings = asyncio.run(checked())
        except UserError as error:
            yield Finding("config", str(error), Level.STOPS)
            return
    for line in lines:
        about, text = line.split(maxsplit=1)
        yield Finding(about, text)
    yield from (Finding("reward", warning, Level.WARNS) for warning in warnings)


def check_disk(config: Config, url: str, parameters: int) -> Iterator[Finding]:
    """Checks space, file system and flush time of run.dir, or of its nearest parent folder that exists."""
    from offbeat.ledger.database import network_file_system

    wanted = Path(config.run.dir).absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not folder.is_dir():
        raise UserError(f'run.dir = "{config.run.dir}": {folder} is a file; give a folder')
    try:
        fsync_s = _fsync_s(folder)
    except OSError as error:
        raise UserError(f'run.dir = "{config.run.dir}": cannot write in {folder}: {error.strerror}') from error
    space, needed = shutil.disk_usage(folder), sum(disk_bytes(config, parameters or None).values())
    what = "a run takes at most" if parameters else "trajectories take at most"
    text = f"{size(space.free)} free of {size(space.total)} in {wanted}; {what} {size(needed)}"
    remedy = "free space, --run.dir FOLDER elsewhere, or --checkpoint.keep 1"
    yield judged("disk", text, bad=needed > space.free, remedy=remedy)
    if network := network_file_system(folder):
        remedy = "--run.dir FOLDER on a local disk; --ledger.backup and --weights.store may be anywhere"
        yield Finding("file system", f"{network}, over the network: SQLite can lose data", Level.STOPS, remedy)
    is_slow = fsync_s > SLOW_FSYNC_S
    text = f"{fsync_s * 1000:.1f} ms" + ("; every acknowledgement waits for it" if is_slow else "")
    yield judged("fsync", text, bad=is_slow, remedy="--run.dir FOLDER on a faster disk")


def _fsync_s(folder: Path) -> float:
    taken_s = []
    with tempfile.TemporaryFile(dir=folder, prefix=".offbeat-doctor-") as file:
        for _ in range(5):
            begin = time.monotonic()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            taken_s.append(time.monotonic() - begin)
    return statistics.median(taken_s)


def check_server(config: Config, url: str, parameters: int) -> Iterator[Finding]:
    """Asks a server the same questions as a worker would, and compares the answers with the configuration."""
    return compare_server(config, url, asyncio.run(_facts(url)))


async def _facts(url: str) -> Facts:
    from offbeat.engines.http_calls import Server
    from offbeat.engines.process.lifecycle import KEY_VARIABLE
    from offbeat.engines.protocol import EngineError

    class ReadOnlyServer(Server):
        """Refuses calls that pause, resume or load weights, because a worker may be using the server."""

        async def post(self, path: str, body: Any = None, **options: Any) -> Any:
            if path == "/continue_generation":  # workers always send it, because SGLang does not report pauses
                return None
            if path not in ("/generate", "/inference/v1/generate"):
                raise EngineError(
                    f"{self.url}: the server is paused, because a worker is loading weights or died while loading "
                    "them; try again soon, and restart the server if it is still paused then"
                )
            return await super().post(path, body, **options)

    server = ReadOnlyServer(url, api_key=os.environ.get(KEY_VARIABLE))
    try:
        return await (await _dialect(server)).probe()
    finally:
        await server.close()


async def _dialect(server: Server) -> Dialect:
    """Finds out whether a server runs SGLang or vLLM, by a request that no other engine answers in the same way."""
    from offbeat.engines.http_calls import ServerAway, ServerRefused
    from offbeat.engines.sglang.api import SglangDialect
    from offbeat.engines.vllm.api import VllmDialect

    for dialect, path, key in ((SglangDialect, "/model_info", "model_path"), (VllmDialect, "/version", "version")):
        try:
            answer = await server.get(path)
        except ServerRefused:
            continue
        except ServerAway as error:
            raise UserError(f"{server.url}: no server answers; start one, such as {START} ({error})") from error
        if isinstance(answer, dict) and key in answer:
            return dialect(server)
    raise UserError(f"{server.url}: the server answers, but neither as vLLM nor as SGLang does; check the URL")


def compare_server(config: Config, url: str, facts: Facts) -> Iterator[Finding]:
    rollout, kind, modes = config.rollout, facts.name.split()[0], sorted(facts.kv_modes)
    is_served, context = rollout.engine in SERVED, rollout.max_prompt_tokens + rollout.max_new_tokens
    works = f"--rollout.engine {kind} --rollout.workers 1 --engine.url {url}: {facts.name}"
    text = f"{facts.fingerprint} at {url}, {facts.max_context_tokens:,} tokens of context"
    yield Finding("server", text, works=works)
    is_wrong = not facts.is_tempered and rollout.temperature != 1
    text = f"computed {'after' if facts.is_tempered else 'before'} temperature"
    remedy = "--rollout.temperature 1, or start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    yield judged("log-probs", text, bad=is_wrong, remedy=remedy, level=Level.STOPS)
    spans = "each token" if facts.has_spans else "each call, so that a load interrupts all calls"
    labels = "weights can be labelled" if facts.has_labels else "weights cannot be labelled"
    yield Finding("weights", f"their version is known for {spans}; {labels}; KV modes: {', '.join(modes)}")
    if facts.max_context_tokens < context:
        text = (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {context:,}; the server's limit is "
            f"{facts.max_context_tokens:,}"
        )
        remedy = f"start the server for {context} tokens (vLLM: --max-model-len, SGLang: --context-length)"
        yield Finding("context", text, Level.STOPS if is_served else Level.WARNS, remedy)
    if is_served and rollout.kv not in modes:
        text = f'rollout.kv = "{rollout.kv}"; the server supports only {", ".join(modes)}'
        yield Finding("kv", text, Level.STOPS, f"--rollout.kv {modes[-1]}")
    if is_served and kind != rollout.engine:
        text = f'rollout.engine = "{rollout.engine}", but the server at {url} is {kind}'
        yield Finding("engine", text, Level.STOPS, f"--rollout.engine {kind}")


PROBES = {"torch": check_torch, "run": check_run, "disk": check_disk, "server": check_server}

if __name__ == "__main__":
    extras.owns_process = True
    try:
        found = list(PROBES[sys.argv[1]](from_dict(json.load(sys.stdin)), sys.argv[2], int(sys.argv[3])))
    except Exception as error:  # noqa: BLE001  # its line becomes the finding
        text = " ".join(str(error).split())
        sys.exit(text if isinstance(error, OffbeatError) else f"{type(error).__name__}: {text}")
    print(json.dumps([asdict(finding) for finding in found]))
