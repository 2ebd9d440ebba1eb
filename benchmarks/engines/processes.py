"""The engine in processes of its own: as a worker starts it, as vLLM's HTTP server, and as vLLM's own `LLM`, with the
same arguments. None of them is left when its context ends: a GPU holds one engine at a time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.vllm_http import http_command, http_endpoint, http_environment
from benchmarks.engines.work import Batch, Done, checked
from offbeat.config.schema import Config
from offbeat.engines.process import commands
from offbeat.engines.process.commands import EngineMachine
from offbeat.engines.process.endpoints import Endpoint, direct_endpoint
from offbeat.engines.process.server import EngineServer
from offbeat.errors import OffbeatError, UserError

SCRIPT = Path(__file__).with_name("offline.py")
START_WITHIN_S, BATCH_WITHIN_S, END_WITHIN_S, VANISH_WITHIN_S = 600.0, 600.0, 30.0, 5.0
ASK_WITHIN_S = 60.0
LOG_LINES = 20
MODULE = "-m"
ALL = ("--max-num-batched-tokens", "8192")
"""Arguments for which they have different defaults; those of the server are used."""
CPU = ("--enforce-eager",)
"""Arguments on a CPU, where compiling a model would take longer than all measurements."""
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def find_vllm(python: str) -> None:
    """Raises if an interpreter has no vLLM."""
    needs = "this benchmark needs an interpreter with vLLM: name it by --python, or a running server by --url"
    try:
        done = subprocess.run([python, "-c", FIND], env=_ours(), capture_output=True, timeout=ASK_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{python}: {type(error).__name__}: {needs}") from error
    if done.returncode != 0:
        raise UserError(f"{python} has no vLLM: {needs}")


def _ours() -> dict[str, str]:
    return commands.environment(Config(), os.environ)


@dataclass(frozen=True)
class Settings:
    """Settings of an engine, as in a worker's configuration."""

    config: Config
    machine: EngineMachine
    environment: Mapping[str, str]

    @property
    def uses_ipc(self) -> bool:
        return commands.uses_ipc(self.config, self.machine, sees_gpu=torch.cuda.is_available())

    def command(self, listen: Sequence[str]) -> list[str]:
        return commands.command(self.config, self.machine, listen, ipc=self.uses_ipc)

    def http_command(self, listen: Sequence[str]) -> list[str]:
        return http_command(self.config, self.machine, listen, ipc=self.uses_ipc)

    def offline_command(self, script: Path = SCRIPT) -> list[str]:
        """Returns the worker's command line with a script in place of the module."""
        python, *words = commands.command(self.config, self.machine, ())
        return [python, str(script), *words[words.index(MODULE) + 2 :]]


async def find_settings(
    model: Path, python: str, further: Sequence[str], *, num_slots: int, num_prompt_tokens: int, num_tokens: int
) -> Settings:
    words = [*ALL, *(() if torch.cuda.is_available() else CPU), *further]
    config = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "rollout": {
                "engine": "vllm",
                "slots": num_slots,
                "max_prompt_tokens": num_prompt_tokens,
                "max_new_tokens": num_tokens,
            },
            "batch": {"tokens_per_microbatch": 2**20},  # nothing is trained
            "engine": {"python": python, "arguments": words, "start_within_s": START_WITHIN_S},
        }
    )
    environment = commands.environment(config, os.environ)
    return Settings(config, await commands.probe_interpreter(config, environment), environment)


@asynccontextmanager
async def worker_process(settings: Settings, folder: Path, log: Path) -> AsyncIterator[str]:
    """Starts vLLM as a worker does, waits until it answers, and yields its URL."""
    async with _started(settings.command, settings.environment, direct_endpoint, folder, log) as url:
        yield url


@asynccontextmanager
async def server(settings: Settings, folder: Path, log: Path) -> AsyncIterator[str]:
    """Starts vLLM's HTTP server, waits until it answers, and yields its URL."""
    environment = {**settings.environment, **http_environment(settings.config)}
    async with _started(settings.http_command, environment, http_endpoint, folder, log) as url:
        yield url


@asynccontextmanager
async def _started(
    command: Callable[[Sequence[str]], list[str]],
    environment: Mapping[str, str],
    new_endpoint: Callable[[], Endpoint],
    folder: Path,
    log: Path,
) -> AsyncIterator[str]:
    lock = folder / "engine.lock"
    started = EngineServer(
        "vllm", command, environment, new_endpoint=new_endpoint, log=log, lock=lock, start_within_s=START_WITHIN_S
    )
    try:
        await started.start()
        yield started.url
    finally:
        await started.stop()


class Offline:
    """vLLM's own `LLM` in a child process; see offline.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self._process, self._log = process, log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="answers", daemon=True).start()
        self._answer(START_WITHIN_S)

    def run(self, batch: Batch) -> Done:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batch.wire()) + "\n")
        self._process.stdin.flush()
        return checked("in process", batch, Done(**self._answer(BATCH_WITHIN_S)))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, within_s: float) -> Any:
        try:
            line = self._answers.get(timeout=within_s)
        except queue.Empty:
            line = ""
        if not line:
            raise OffbeatError(f"vLLM in process broke, or took over {within_s:.0f} s:\n{last_lines(self._log)}")
        return json.loads(line)


@contextmanager
def offline(settings: Settings, log: Path) -> Iterator[Offline]:
    with _process(settings.offline_command(), settings.environment, log) as process:
        yield Offline(process, log)


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts a process in a process group of its own; the whole group ends with the block."""
    with log.open("a") as errors:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[str]) -> None:
    """Asks all processes of a group to end and kills those that do not, until none is left that can be killed."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(END_WITHIN_S)
    deadline_s = time.monotonic() + VANISH_WITHIN_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)


def last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
