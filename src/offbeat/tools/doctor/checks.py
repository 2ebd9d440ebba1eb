"""Examines this machine for one configuration; each `check_…` returns findings in the order of the report.

Importing torch, writing to the disk, and asking another Python or a server may hang or crash. Each of these checks
therefore runs in a process, which is killed at a deadline or when the doctor is interrupted. If such a process gives no
answer, the report has a finding about it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pydantic import TypeAdapter, ValidationError

import offbeat
from offbeat.config import Config, resolved
from offbeat.config.schema import SERVED, FileTask
from offbeat.config.summary import size
from offbeat.errors import OffbeatError, UserError
from offbeat.host_memory import host_memory
from offbeat.launch.model_size import num_parameters
from offbeat.model.loading import WINDOW_KEYS, cached_folder, is_hub_name, resolve
from offbeat.tools.doctor.report import DoctorReport, Finding, Level, judged

OLDEST = {"vllm": (0, 26), "sglang": (0, 5)}
"""Oldest versions against which Offbeat's calls were checked."""
EXTRAS = {
    "gym": "tasks of reasoning-gym",
    "math": 'the reward "math"',
    "data": "Parquet files and Hugging Face datasets",
    "smollm2": "a real small model without a model hub (offbeat model smollm2)",
    "lora": "adapters instead of all weights (model.lora_rank)",
    "plot": "the reward curve as a picture",
    "gymnasium": "environments of Gymnasium",
    "notebook": "notebooks, and metrics as a data frame",
    "remote": "weights and backups in a store such as S3",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "trackio": "metrics in trackio",
}
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Package that a store needs, by the scheme of its URL."""
SHM = Path("/dev/shm")
MIN_SHM_BYTES = 2**30
"""Shared memory that the processes of one engine need; containers often have 64 MB."""
MIN_FILES = 1024
"""Smallest limit on open files that suffices for connections to workers, ledger, weights and reward processes."""
END_WITHIN_S = 1.0
"""Longest wait for a killed process to end; a process that hangs on a dead disk is not waited for any longer."""
REPAIR_TORCH = "python -c 'import torch' shows more; pip install --force-reinstall torch repairs a broken one"
FIND_ENGINES = """
import importlib.metadata as metadata, importlib.util, json

def version(name):
    owner = (metadata.packages_distributions().get(name) or [name])[0]
    return metadata.version(owner) + ("" if owner == name else f" ({owner})")

print(json.dumps({name: version(name) for name in ("vllm", "sglang") if importlib.util.find_spec(name)}))
"""
"""Program that `engine.python` runs to list its engines. It imports only the standard library, because that Python may
have no packages."""


class ProbeFailed(OffbeatError):
    """A probe crashed, hung or gave a wrong answer; the message is the reason."""


async def examine(
    config: Config, name: str, command: str, engine_url: str | None, mistakes: Sequence[str], within_s: float
) -> DoctorReport:
    """Runs all checks and returns the report. `name` is what the report calls the configuration, `command` is the
    command that would start the run, and `mistakes` are the errors that this command would raise."""
    url = engine_url or config.engine.url or ""
    model, parameters = check_model(config.model.path)
    given = (config, url, parameters, within_s)
    async with asyncio.TaskGroup() as group:
        torch = group.create_task(probe("torch", *given, remedy=REPAIR_TORCH))
        disk = group.create_task(probe("disk", *given, remedy="--run.dir FOLDER on a local disk that you may write to"))
        engines = group.create_task(check_engines(config, url, within_s))
        server = group.create_task(probe("server", *given)) if url else None
        sound = model.level is Level.FINE and not mistakes
        run = group.create_task(probe("run", *given)) if sound else None
    findings = [
        *check_machine(),
        *torch.result(),
        *check_packages(config),
        *engines.result(),
        *(server.result() if server else []),
        *disk.result(),
        *check_limits(starts_server=config.rollout.engine in SERVED and not url),
        *check_ports(config),
        model,
        *(Finding("config", mistake, Level.STOPS) for mistake in mistakes),
        *(run.result() if run else []),
    ]
    return DoctorReport(f"{name} with {engine_url}" if engine_url else name, command, findings)


async def probe(
    about: str, config: Config, url: str, parameters: int, within_s: float, remedy: str = ""
) -> list[Finding]:
    """Runs the check named `about` of `offbeat.tools.doctor.probes` in a process and returns its findings. If the check
    fails, the failure is the only finding, with `remedy` as advice. `parameters` is the model's size."""
    command = (sys.executable, "-P", "-m", "offbeat.tools.doctor.probes", about, url, str(parameters))
    try:  # the configuration goes to standard input: every user of the machine can read command lines
        return TypeAdapter(list[Finding]).validate_json(await ask(command, within_s, json.dumps(resolved(config))))
    except (ProbeFailed, ValidationError) as error:
        return [Finding(about, str(error).splitlines()[0], Level.STOPS, remedy)]


async def ask(command: Sequence[str], within_s: float, given: str = "", **options: Any) -> str:
    """Runs `command` with `given` as its input and returns the last line of its output, since packages may print lines
    before it. Raises `ProbeFailed` if the command fails or takes more than `within_s` seconds."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, **options
        )
    except OSError as error:
        raise ProbeFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(within_s):
            out, err = await process.communicate(given.encode())
    except TimeoutError:
        raise ProbeFailed(f"the check gave no answer within {within_s:g} s") from None
    finally:
        with suppress(ProcessLookupError, PermissionError):  # the group may have ended already
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_WITHIN_S):
                await process.wait()
    if process.returncode and process.returncode < 0:
        raise ProbeFailed(f"the check crashed: {signal.Signals(-process.returncode).name}")
    lines = (err if process.returncode else out).decode(errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else f"the check ended with status {process.returncode}"
    if process.returncode:
        raise ProbeFailed(last[:300])
    return last


def check_machine() -> Iterator[Finding]:
    commit = f", commit {found}" if (found := _commit()) else ""
    yield Finding("offbeat", f"{importlib.metadata.version('offbeat')}{commit}, in {Path(offbeat.__file__).parent}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("platform", f"{platform.system()} {platform.release()} {platform.machine()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", f"{platform.processor() or platform.machine()}, {cores} cores")
    free, total = host_memory()
    yield Finding("memory", f"{size(free)} free of {size(total)}")


def check_packages(config: Config) -> Iterator[Finding]:
    """Checks installed versions by their metadata. Imports nothing, so that a broken package is reported too."""
    wrong = {text: problem for text in _requirements("") if (problem := _problem(text))}
    if not wrong:
        yield Finding("packages", "all that Offbeat requires")
    for text, problem in wrong.items():
        yield Finding(problem.split()[0], problem, Level.STOPS, f"pip install '{text}'")
    needed, stores = _needed_extras(config)
    for extra, purpose in EXTRAS.items():
        about, remedy = f"extra {extra}", f"pip install 'offbeat[{extra}]'"
        problems = "; ".join(filter(None, map(_problem, _requirements(extra))))
        why, level = (f"{needed[extra]} needs it", Level.STOPS) if extra in needed else (purpose, Level.ABSENT)
        yield Finding(about, f"{problems}; {why}", level, remedy) if problems else Finding(about, purpose)
    for name, key in stores.items():
        if problem := _problem(name):
            yield Finding(name, f"{problem}; {key} needs it", Level.STOPS, f"pip install {name}")


def _needed_extras(config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Returns what the configuration needs: extras of Offbeat, and packages for remote stores. Both dictionaries map a
    name to the configuration key that needs it."""
    stores = (("weights.store", config.weights.store), ("ledger.backup", config.ledger.backup))
    remote = {key: url.split("://")[0] for key, url in stores if url and "://" in url}
    files = [task for task in config.task if isinstance(task, FileTask)]
    needs: dict[str, tuple[object, str]] = {
        "gym": (any(task.source == "reasoning-gym" for task in config.task), "task.source"),
        "data": (any(task.source == "dataset" or task.path.endswith(".parquet") for task in files), "task.path"),
        "math": (any(task.reward == "math" for task in config.task), "task.reward"),
        "lora": (config.model.lora_rank, "model.lora_rank"),
        "remote": (remote, " and ".join(remote)),
        **dict.fromkeys(config.log.sinks, (True, "log.sinks")),
    }
    packages = {STORES[scheme]: key for key, scheme in remote.items() if scheme in STORES}
    return {extra: key for extra, (is_needed, key) in needs.items() if is_needed}, packages


def _requirements(extra: str) -> Iterator[str]:
    """Yields the requirements of an extra of Offbeat, or of Offbeat itself if `extra` is empty."""
    for text in importlib.metadata.requires("offbeat") or []:
        wanted = Requirement(text)
        is_optional = "extra" in str(wanted.marker)
        if is_optional == bool(extra) and (wanted.marker is None or wanted.marker.evaluate({"extra": extra})):
            yield f"{wanted.name}{wanted.specifier}"


def _problem(requirement: str) -> str:
    """Returns what is wrong with a required package; empty if the installed version satisfies the requirement."""
    wanted = Requirement(requirement)
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    fits = wanted.specifier.contains(found, prereleases=True)
    return "" if fits else f"{wanted.name} {found} is installed, and Offbeat requires {wanted.specifier}"


def _commit() -> str:
    """Returns the commit of the working copy that Offbeat runs from, or that pip installed; empty if unknown."""
    root = Path(offbeat.__file__).parents[2]
    if not (root / ".git").exists():
        text = importlib.metadata.distribution("offbeat").read_text("direct_url.json") or "{}"
        return str(json.loads(text).get("vcs_info", {}).get("commit_id", ""))[:7]
    git = ("git", "-C", str(root), "describe", "--always", "--dirty= and changes", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


async def check_engines(config: Config, url: str, within_s: float) -> list[Finding]:
    """Finds out which engines are installed for the Python in `engine.python`, and whether their versions suffice. That
    Python runs without our PYTHONPATH and working folder, just as when it starts a server."""
    engine, python = config.rollout.engine, config.engine.python or sys.executable
    wanted = engine if engine in SERVED and not url else ""
    program = shutil.which(os.path.expanduser(python))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        if program is None:
            remedy = "make this environment, or give the path of another Python"
            raise ProbeFailed(f'engine.python = "{python}": no such program; {remedy}')
        path = os.path.abspath(program)
        found = json.loads(await ask((path, "-c", FIND_ENGINES), within_s, cwd="/", env=environment))
    except (ProbeFailed, ValueError) as error:
        remedy = "--engine.python PATH names the Python that has the engine"
        return [Finding("engines", str(error), Level.STOPS if wanted else Level.WARNS, remedy)]
    return [_engine(name, found.get(name), path, is_wanted=name == wanted) for name in SERVED]


def _engine(name: str, version: str | None, path: str, *, is_wanted: bool) -> Finding:
    if version is None:
        text, folder = f"not installed in {path}", f"~/{name}"
        remedy = f"python -m venv {folder} && {folder}/bin/pip install {name}, then --engine.python {folder}/bin/python"
        return Finding(name, text, Level.STOPS if is_wanted else Level.ABSENT, remedy)
    numbers, oldest = re.match(r"(\d+)\.(\d+)", version), ".".join(map(str, OLDEST[name]))
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST[name]:
        text, remedy = (
            f"{version}, in {path}; it must be {oldest} or later",
            f"{path} -m pip install '{name}>={oldest}'",
        )
        return Finding(name, text, Level.WARNS, remedy)
    works = f"--rollout.engine {name} --rollout.workers 1 --engine.python {path}: {name} {version}"
    return Finding(name, f"{version}, in {path}", works=works)


def check_limits(*, starts_server: bool) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {soft:,}" if 0 <= soft < 2**62 else "no limit"  # -1 or a huge number: unlimited
    yield judged("open files", text, bad=0 <= soft < MIN_FILES, remedy=f"ulimit -n {4 * MIN_FILES}")
    if SHM.is_dir():
        shm = shutil.disk_usage(SHM)
        remedy = "mount -o remount,size=8G /dev/shm; for a container, --shm-size 8g"
        text, is_short = f"{size(shm.free)} free of {size(shm.total)}", starts_server and shm.free < MIN_SHM_BYTES
        yield judged("shared memory", text, bad=is_short, remedy=remedy)


def check_ports(config: Config) -> Iterator[Finding]:
    host, port = config.serve.host, config.serve.port
    if fault := _listen("127.0.0.1", 0):
        level = Level.STOPS if port or config.rollout.workers is not None else Level.WARNS
        remedy = "allow it in the sandbox, container or firewall"
        yield Finding("ports", f"nothing can listen on 127.0.0.1: {fault}", level, remedy)
    elif port and (fault := _listen(host, port)):
        text = f'serve.host = "{host}", serve.port = {port}: {fault}'
        yield Finding("ports", text, Level.STOPS, "--serve.port 0, or end the process that listens there")
    else:
        yield Finding("ports", f"{host}:{port} is free" if port else "127.0.0.1 has free ports")


def _listen(host: str, port: int) -> str:
    """Listens on a port for a moment; returns the error, or "" if that worked."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return str(error.strerror).split(" (while")[0]
    return ""


def check_model(path: str) -> tuple[Finding, int]:
    """Checks the model at `path`, a folder or a name on the hub, by the headers of its files. Asks the hub about a
    model that is not downloaded yet. Returns the finding and the model's number of parameters (0 if unknown)."""
    try:
        parameters = num_parameters(path) or 0
        folder = cached_folder(path) if is_hub_name(path) else resolve(path)
        if folder is None or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            text = f"{path}: on the hub, {parameters:,} parameters, not downloaded yet"
            return Finding("model", text, Level.WARNS, f"hf download {path}"), parameters
        config = json.loads((folder / "config.json").read_text())
    except UserError as error:
        return Finding("model", str(error), Level.STOPS), 0
    except (OSError, ValueError) as error:
        return Finding("model", f"{path}: {error}; copy it again", Level.STOPS), 0
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    text = config.get("text_config") or config
    window = next((f", {text[key]:,} tokens of context" for key in WINDOW_KEYS if isinstance(text.get(key), int)), "")
    return Finding("model", f"{path}: {architecture}, {parameters:,} parameters{window}"), parameters
