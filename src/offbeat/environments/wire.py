"""The messages between a worker and the processes that hold its environments: msgpack frames, as for rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from offbeat.environments.protocol import Turn
from offbeat.rewards.wire import HEAD, MARK, read_message, take_messages

CUT, RAISED = "cut", "raised"
"""Statuses of a call besides those of `CallStatus`: it was given up at its time limit, or the tool raised."""


class PartSpec(msgspec.Struct, frozen=True):
    """What the episodes of one task need: a tool is a function or a class, an environment is a class."""

    path: str = ""
    """`module:class` or `file.py:class` of the environment; "": the task has tools only."""
    options: dict[str, Any] = {}
    tools: tuple[str, ...] = ()


class Load(msgspec.Struct, tag=True):
    """First message to a process: the parts of all tasks by the name of their source, and limits."""

    parts: dict[str, PartSpec]
    step_timeout_s: float
    parallel_calls: int
    memory_bytes: int


class ToolInfo(msgspec.Struct, frozen=True):
    """A tool as a chat template and a parser see it."""

    name: str
    schema: dict[str, Any]


class PartInfo(msgspec.Struct, frozen=True):
    """What a process found out about a part when it loaded it."""

    deterministic: bool
    isolated: bool
    stop_tokens: tuple[str, ...]
    can_save: bool
    tools: tuple[ToolInfo, ...]
    has_environment: bool


class Loaded(msgspec.Struct, tag=True):
    parts: dict[str, PartInfo]


class RefusedLoad(msgspec.Struct, tag=True):
    """A part cannot be loaded, for a reason that the user can correct."""

    message: str


class Begin(msgspec.Struct, tag=True):
    episode: int
    part: str
    problem: dict[str, Any]
    seed: int


class Step(msgspec.Struct, tag=True):
    episode: int
    turn: Turn


class Close(msgspec.Struct, tag=True):
    episode: int


class Ping(msgspec.Struct, tag=True):
    """Asks whether the process still reads its pipe."""


class Began(msgspec.Struct, tag=True):
    episode: int
    content: str | list[dict[str, Any]]
    tools: tuple[ToolInfo, ...] = ()
    """Tools that only this episode has."""


class Stepped(msgspec.Struct, tag=True, omit_defaults=True):
    """What a turn led to."""

    episode: int
    content: str | list[str] = ""
    """One observation, or one for each call of the turn."""
    reward: float = 0.0
    is_done: bool = False
    rewards: dict[str, float] = {}
    """What the episode earned at its end, by name."""
    state: dict[str, Any] = {}
    error: bool = False
    """Whether `content` tells the model about a mistake of its own."""
    calls: list[tuple[str, str, float]] = []
    """Name, status and milliseconds of each call."""
    num_stuck: int = 0
    """Number of calls that were given up, but still run in the process."""


class Failed(msgspec.Struct, tag=True):
    """The episode cannot go on: the class or `begin` raised, or a reply is of a wrong kind."""

    episode: int
    error: str


class Pong(msgspec.Struct, tag=True):
    pass


ToProcess = Load | Begin | Step | Close | Ping
FromProcess = Loaded | RefusedLoad | Began | Stepped | Failed | Pong

_encoder = msgspec.msgpack.Encoder()
_to_process = msgspec.msgpack.Decoder(ToProcess)
_from_process = msgspec.msgpack.Decoder(FromProcess)


def frame(message: ToProcess | FromProcess) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(MARK, len(body)) + body


def read_from_pool(pipe: BinaryIO) -> ToProcess | None:
    """Waits for the next message and returns it; None if the pool closed the pipe or has ended."""
    return read_message(pipe, _to_process)


def take_from_process(buffer: bytearray) -> Iterator[FromProcess]:
    """Removes complete messages from the front of `buffer` and yields them; raises `Junk` if it holds anything else."""
    return take_messages(buffer, _from_process)
