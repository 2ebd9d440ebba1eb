"""vLLM's own HTTP server with the settings that Offbeat's process has, to be compared with it, and for tests of servers
that a user runs (engine.url)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.config.schema import Config
from offbeat.engines.http_calls import UNIX
from offbeat.engines.process import commands
from offbeat.engines.process.commands import EngineMachine
from offbeat.engines.process.endpoints import Endpoint, new_socket
from offbeat.engines.vllm.direct import MODULE
from offbeat.engines.vllm.lora import ALLOW

SERVER = "vllm.entrypoints.openai.api_server"
SERVED_NAME = "offbeat"
SWITCHES = ("--tokens-only", "--disable-uvicorn-access-log")
"""The server takes and returns token ids only; text would cost it time."""


def http_endpoint() -> Endpoint:
    path = new_socket()
    return Endpoint(f"{UNIX}{path}", ("--uds", path), str(Path(path).parent))


def http_command(config: Config, machine: EngineMachine, listen: Sequence[str], *, ipc: bool = False) -> list[str]:
    words = commands.command(config, machine, listen, ipc=ipc)
    words[words.index(MODULE)] = SERVER
    return [*words, "--served-model-name", SERVED_NAME, *SWITCHES]


def http_environment(config: Config) -> dict[str, str]:
    """Returns the environment of a server with control calls and, for a run that trains adapters, calls that load
    them."""
    environment: Mapping[str, str] = commands.environment(config, os.environ)
    adapters = {ALLOW: "1"} if config.model.lora_rank else {}
    return {**environment, "VLLM_SERVER_DEV_MODE": "1", **adapters}
