import asyncio
import os
import sys
import textwrap

import pytest

from offbeat.environments.adapters import mcp
from offbeat.environments.protocol import Call, CallStatus, EpisodeFailed
from offbeat.environments.tools import bind_calls, tools_of
from offbeat.errors import UserError

SERVER = """
import json, os, sys
print("hello, I am no message")
calls = 0
for line in sys.stdin:
    message = json.loads(line)
    method, answer = message.get("method"), {}
    if "id" not in message:
        continue
    if method == "initialize":
        about = {"name": "x", "version": "1"}
        answer = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
        print(json.dumps({"jsonrpc": "2.0", "id": "s1", "method": "roots/list"}), flush=True)
    if method == "tools/list":
        numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
        add = {"type": "object", "properties": numbers, "required": ["a", "b"]}
        first = [{"name": "add", "description": "Adds.", "inputSchema": add}]
        rest = [{"name": name, "inputSchema": {"type": "object"}} for name in ("count", "fail", "die", "hang")]
        answer = {"tools": rest} if message["params"].get("cursor") else {"tools": first, "nextCursor": "2"}
    if method == "tools/call":
        name, arguments = message["params"]["name"], message["params"]["arguments"]
        calls += 1
        if name == "die":
            os._exit(3)
        if name == "hang":
            continue
        text = str(arguments["a"] + arguments["b"]) if name == "add" else str(calls)
        answer = {"content": [{"type": "text", "text": text}, {"type": "image"}], "isError": name == "fail"}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": answer}), flush=True)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return f"{sys.executable} {file}"


@pytest.fixture(scope="module")
def kind(command):
    return mcp.toolset(command)


def episode(kind, *calls):
    """What the calls of one episode return, or raise."""

    async def run():
        made = kind()
        tools = {tool.name: tool for tool in tools_of(made, "x")}
        found = []
        for name, arguments in calls:
            (call,) = bind_calls([Call(name, arguments)], tools)
            if call.status is not CallStatus.OK:
                found.append(call.problem)
                continue
            try:
                found.append(await tools[name].function(**call.arguments))
            except (EpisodeFailed, mcp.ToolFailed) as error:
                found.append(error)
        await made.close()
        return found

    return asyncio.run(run())


def test_tools_of_a_server_are_called_with_arguments_of_their_types(kind):
    assert sorted(tool.name for tool in tools_of(kind(), "x")) == ["add", "count", "die", "fail", "hang"]
    found = episode(kind, ("add", {"a": "37", "b": 5}), ("add", {"a": "x", "b": 5}), ("add", {"a": 1}), ("ad", {}))
    assert found[0] == "42\n[image]"
    assert found[1:] == [
        "a of add: must be integer, not 'x'",
        "add needs b",
        "there is no tool 'ad'; did you mean 'add'?",
    ]


def test_each_episode_has_a_server_of_its_own(kind):
    assert episode(kind, ("count", {}), ("count", {})) == ["1\n[image]", "2\n[image]"]
    assert episode(kind, ("count", {})) == ["1\n[image]"]


def test_a_tool_that_fails_is_told_to_the_model_and_a_server_that_dies_fails_the_episode(kind, command):
    failed, died, after = episode(kind, ("fail", {}), ("die", {}), ("count", {}))
    assert isinstance(failed, mcp.ToolFailed)
    for error in (died, after):
        assert isinstance(error, EpisodeFailed), "and no later call begins with another server as if nothing had been"
        assert str(error).startswith(f"{command}: the server has died")
    assert episode(kind, ("count", {})) == ["1\n[image]"]


def test_a_server_that_does_not_answer_fails_the_episode_in_time(kind, monkeypatch):
    monkeypatch.setattr(mcp, "ANSWER_WITHIN_S", 0.3)
    (error,) = episode(kind, ("hang", {}))
    assert isinstance(error, EpisodeFailed)
    assert "no answer to tools/call within" in str(error)


@pytest.mark.parametrize(
    "command, told",
    [
        ("no-such-program --x", "there is no program 'no-such-program'"),
        ("", "there is no program ''"),
        ("false", "the server has died"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_anything_starts(command, told):
    with pytest.raises(UserError) as caught:
        mcp.toolset(command)
    assert str(caught.value).startswith(f'tools = ["mcp:{command}"]: ')
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.full
@pytest.mark.skipif("OFFBEAT_MCP_PYTHON" not in os.environ, reason="OFFBEAT_MCP_PYTHON names no Python with mcp")
def test_the_server_of_the_package_mcp(tmp_path):
    file = tmp_path / "server.py"
    file.write_text(
        textwrap.dedent(
            """
            try:
                from mcp.server.fastmcp import FastMCP as Server
            except ImportError:
                from mcp.server import MCPServer as Server

            server = Server("sums")

            @server.tool()
            def add(a: int, b: int) -> int:
                "Adds two numbers."
                return a + b

            server.run(transport="stdio")
            """
        )
    )
    kind = mcp.toolset(f"{os.environ['OFFBEAT_MCP_PYTHON']} {file}")
    assert episode(kind, ("add", {"a": 37, "b": "5"}))[0] == "42"
