"""Finds what an entry of `task.tools` or `task.path` names: a function or class of the user's, or one of the adapters.

- `python`: an interpreter in a sandbox
- `mcp:COMMAND`: the tools of an MCP server
- `gymnasium:ID`, `reasoning-gym:DATASET`, `openenv:URL`: environments
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from offbeat.locate import locate

PYTHON = "python"
ADAPTERS = "offbeat.environments.adapters"
TOOLS = {"mcp": "mcp"}
"""Module with `toolset`, by the word in front of the colon. It is imported when it is asked for: most runs need none,
and a process with environments must start fast."""
ENVIRONMENTS = {"gymnasium": "gymnasium", "reasoning-gym": "reasoning", "openenv": "openenv"}
"""Module with `environment`, likewise."""


def find_tools(entry: str, key: str) -> Callable[..., Any]:
    """Returns the function, or the class with tools, that an entry of `task.tools` names; `key` is for errors."""
    if entry == PYTHON:
        sandbox = import_module("offbeat.environments.sandbox")
        sandbox.check_sandbox()
        return sandbox.PythonSandbox
    kind, _, rest = entry.partition(":")
    return import_module(f"{ADAPTERS}.{TOOLS[kind]}").toolset(rest) if kind in TOOLS else locate(entry, key)


def find_environment(path: str, key: str) -> Callable[..., Any]:
    """Returns the class of the environment that `task.path` names; `key` is for errors."""
    kind, _, rest = path.partition(":")
    return (
        import_module(f"{ADAPTERS}.{ENVIRONMENTS[kind]}").environment(rest)
        if kind in ENVIRONMENTS
        else locate(path, key)
    )
