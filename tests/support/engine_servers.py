"""Servers of real engines, for tests: where they are found, how one is started for a while."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.vllm_http import http_command, http_endpoint, http_environment
from offbeat.config.schema import Config
from offbeat.engines.dialect import Dialect
from offbeat.engines.http_calls import Server
from offbeat.engines.process import commands
from offbeat.engines.process.endpoints import new_endpoint
from offbeat.engines.process.server import EngineServer
from offbeat.engines.sglang.api import SglangDialect
from offbeat.engines.vllm.api import VllmDialect
from offbeat.engines.vllm.direct import Channel, DirectDialect

NUM_SLOTS = 16
START_WITHIN_S = 600.0
BESIDE_OTHERS = "--attention-backend TRITON_ATTN --enforce-eager --kv-cache-memory-bytes 2000000000"
ENGINE_ARGUMENTS = shlex.split(
    os.environ.get("OFFBEAT_ENGINE_ARGS", BESIDE_OTHERS if torch.cuda.is_available() else "")
)
"""For vLLM. On a GPU Triton's attention takes every dtype; without graphs vLLM starts twice as fast. There it is told
how much memory to take because several tests share the GPU: what others take or give back while it starts would make it
give up."""
SERVERS = {
    "direct": ("", "OFFBEAT_VLLM_PYTHON"),
    "vllm": ("OFFBEAT_VLLM_URL", "OFFBEAT_VLLM_PYTHON"),
    "sglang": ("OFFBEAT_SGLANG_URL", "OFFBEAT_SGLANG_PYTHON"),
}


class SpanlessDialect(VllmDialect):
    """A newer server driven as an older one, which can neither name its weights nor tell where they changed."""

    async def _can_label(self) -> bool:
        return False


class LabelledDialect(VllmDialect):
    """The same as one in between: it names its weights, and does not tell where they changed."""

    async def _sends_spans(self) -> bool:
        return False


DIALECTS = {
    "direct": DirectDialect,
    "vllm": VllmDialect,
    "vllm without spans": LabelledDialect,
    "vllm without labels": SpanlessDialect,
    "sglang": SglangDialect,
}


KEYS: dict[str, str | None] = {}
"""What servers that were started here ask for, by their URLs."""


def server_at(url: str) -> Server:
    return Server(url, api_key=KEYS.get(url))


def dialect_of(name: str, url: str) -> Dialect:
    return DirectDialect(Channel(url)) if name == "direct" else DIALECTS[name](server_at(url))


def started(name: str, model: Path) -> Iterator[str]:
    """The URL of a server that serves a model: one that runs already, or one that runs until the tests are over."""
    url_variable, python_variable = SERVERS[name]
    if url := os.environ.get(url_variable, ""):
        yield url
        return
    with own_server(name, os.environ[python_variable], model) as (url, _):
        yield url


@contextmanager
def own_server(
    name: str,
    python: str,
    model: Path,
    log: Path | None = None,
    *,
    lora_rank: int = 0,
    arguments: Sequence[str] = (),
) -> Iterator[tuple[str, EngineServer]]:
    """A server that runs until this ends, as a worker starts it; by the name "vllm", as a user would (engine.url)."""
    engine = "vllm" if name == "direct" else name
    config = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32", "lora_rank": lora_rank},
            "rollout": {"engine": engine, "slots": NUM_SLOTS, "max_prompt_tokens": 1024, "max_new_tokens": 1024},
            "engine": {
                "python": python,
                "memory_share": 0.05,
                "arguments": [*ENGINE_ARGUMENTS, *arguments],
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder, loop_of_its_own() as run:
        is_http = name == "vllm"
        environment = http_environment(config) if is_http else commands.environment(config, os.environ)
        machine = run(commands.probe_interpreter(config, environment))
        server = EngineServer(
            name,
            partial(http_command if is_http else commands.command, config, machine),
            commands.suited(config, environment, machine),
            new_endpoint=http_endpoint if is_http else partial(new_endpoint, engine),
            log=log or Path(folder) / "engine.log",
            lock=Path(folder) / "engine.lock",
            start_within_s=START_WITHIN_S,
        )
        try:
            run(server.start())
            KEYS[server.url] = server.key
            yield server.url, server
        finally:
            run(server.stop())


@contextmanager
def loop_of_its_own() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines for those who have no loop, all in one that lives on between them, as child processes need."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
