"""Tools of a server of the Model Context Protocol, over its standard streams: `tools = ["mcp:COMMAND"]`.

The server runs as a process of its own for each episode that calls it, so that no episode sees what another one left
there. It is asked for its tools once, before anything starts. A server that dies, or does not answer, fails the episode
with its reason. The package mcp is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import Any

from offbeat.environments.protocol import EpisodeFailed
from offbeat.environments.tools import NAME, Tool
from offbeat.errors import OffbeatError, UserError

PROTOCOL = "2025-06-18"
START_WITHIN_S = 60.0
ANSWER_WITHIN_S = 300.0
"""Longest wait for a tool; environment.step_timeout_s is usually shorter."""
MAX_LINE_BYTES = 16 << 20
MAX_PAGES = 100
END_WITHIN_S = 5.0


class ToolFailed(OffbeatError):
    """A tool of a server says that it failed; the model is told."""


def toolset(command: str) -> type:
    """Returns the class whose objects are connections to servers that `command` starts."""
    arguments = shlex.split(command)
    key = f'tools = ["mcp:{command}"]'
    if not arguments or shutil.which(arguments[0]) is None:
        raise UserError(f"{key}: there is no program {arguments[0] if arguments else ''!r}; name the server's command")
    try:
        listed = asyncio.run(_list_once(arguments))
    except (EpisodeFailed, ToolFailed) as error:
        raise UserError(f"{key}: {error}") from error
    for tool in listed:
        if not isinstance(tool.get("name"), str) or NAME.fullmatch(tool["name"]) is None:
            raise UserError(f"{key}: its tool {tool.get('name')!r:.80} has no name that a model can call")
    if not listed:
        raise UserError(f"{key}: the server has no tools")

    class Named(McpTools):
        def __init__(self) -> None:
            super().__init__(arguments, listed)

    return Named


async def _list_once(arguments: list[str]) -> list[dict[str, Any]]:
    server = McpServer(arguments)
    try:
        return await server.list_tools()
    finally:
        await server.close()


class McpTools:
    """The tools of a server; the server is started at the first call."""

    def __init__(self, arguments: list[str], listed: list[dict[str, Any]]):
        self.server, self.listed = McpServer(arguments), listed

    def as_tools(self) -> list[Tool]:
        return [self._tool(tool) for tool in self.listed]

    def _tool(self, listed: Mapping[str, Any]) -> Tool:
        name, parameters = listed["name"], listed.get("inputSchema") or {"type": "object", "properties": {}}
        described = listed.get("description") or listed.get("title") or name
        function = {"name": name, "description": described, "parameters": parameters}
        call = partial(self.server.call, name)
        return Tool(name, _Called(call), {"type": "function", "function": function})

    async def close(self) -> None:
        await self.server.close()


class _Called:
    """A tool of a server as a function: `__call__` takes whatever arguments there are."""

    sequential = True

    def __init__(self, call: Any):
        self._call = call

    async def __call__(self, **arguments: Any) -> str:
        return await self._call(arguments)


class McpServer:
    """A connection to a server process."""

    def __init__(self, arguments: list[str]):
        self.arguments, self.name = arguments, shlex.join(arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()

    async def list_tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = await self._ask("tools/list", cursor, START_WITHIN_S)
            found += [tool for tool in page.get("tools", ()) if isinstance(tool, dict)]
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool and returns its result as text."""
        result = await self._ask("tools/call", {"name": tool, "arguments": dict(arguments)}, ANSWER_WITHIN_S)
        parts = [part for part in result.get("content", ()) if isinstance(part, dict)]
        texts = [str(part["text"]) if "text" in part else f"[{part.get('type', 'content')}]" for part in parts]
        if not texts and "structuredContent" in result:
            texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
        text = "\n".join(texts)
        if result.get("isError"):
            raise ToolFailed(text or f"{tool} failed")
        return text

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError, ConnectionError):
            process.stdin.close()
        try:
            async with asyncio.timeout(END_WITHIN_S):
                await process.wait()
        except TimeoutError:
            pass
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it may have left behind
        await process.wait()

    async def _start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise EpisodeFailed(f"{self.name}: cannot be started: {error}") from error
        about = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "offbeat", "version": "1"},
        }
        await self._exchange("initialize", about, START_WITHIN_S)
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def _ask(self, method: str, params: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        async with self._turn:
            if self._process is None:
                await self._start()
            return await self._exchange(method, params, within_s)

    async def _exchange(self, method: str, params: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        number = next(self._ids)
        await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
        try:
            async with asyncio.timeout(within_s):
                while True:
                    answer = await self._receive(method)
                    if answer.get("id") == number and ("result" in answer or "error" in answer):
                        break
                    if "method" in answer and "id" in answer:  # it asks something of us, such as for a sample
                        refusal = {"code": -32601, "message": "not supported"}
                        await self._send({"jsonrpc": "2.0", "id": answer["id"], "error": refusal})
        except TimeoutError:
            raise EpisodeFailed(f"{self.name}: no answer to {method} within {within_s:.0f} s") from None
        if error := answer.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ToolFailed(f"{method}: {' '.join(str(message).split())[:300]}")
        return answer["result"] if isinstance(answer["result"], dict) else {}

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (OSError, ConnectionError) as error:
            raise EpisodeFailed(f"{self.name}: the server has died") from error

    async def _receive(self, method: str) -> dict[str, Any]:
        """Returns the next message; what is none, such as a greeting, is passed over."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                raise EpisodeFailed(f"{self.name}: its answer to {method} has no end") from None
            if not line:
                raise EpisodeFailed(f"{self.name}: the server has died while it was asked for {method}")
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
