"""The protocol between a reward pool and its processes: msgpack frames, and a shared memory cell for progress.

A frame begins with a mark and its length, so that stray output of a reward is recognised as junk at once. From the cell
the pool learns, even while a process hangs, how many samples the process has begun and when it began the last one.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

MARK = b"\xf0\x9f\xa5\x81"
HEAD = struct.Struct("<4sI")
MAX_BYTES = 1 << 28
"""Size limit of a frame from a process; answers are small."""
HARMED = 86
"""Exit status of a process whose reward closed or replaced the descriptors of its pipes or log."""
ARGUMENTS = ("response", "answer", "prompt", "info", "tokens", "final", "messages", "turns", "state", "claims")
"""Parameters that a reward function may have."""
OTHER_NAMES = {
    **dict.fromkeys(("completion", "output", "generation", "generated", "text"), "response"),
    **dict.fromkeys(("solution", "ground_truth", "target", "label", "reference", "expected"), "answer"),
    **dict.fromkeys(("question", "query", "instruction"), "prompt"),
    **dict.fromkeys(("token_ids", "ids"), "tokens"),
    **dict.fromkeys(("row", "columns", "extra_info"), "info"),
}
"""Names of parameters in reward functions of other libraries, and the parameter here that each corresponds to; for
hints in messages."""


class Setup(msgspec.Struct, tag=True):
    """First message from the pool to a process: rewards by name, either `named` as in a configuration (for
    `load_reward`) or as `pickled` functions."""

    timeout_s: float
    named: dict[str, str]
    pickled: dict[str, bytes]

    @property
    def names(self) -> list[str]:
        return [*self.named, *self.pickled]


class RewardsLoaded(msgspec.Struct):
    """Properties of one reward function, as the process that loaded it found them."""

    arguments: tuple[str, ...]
    in_turn: bool
    """Whether samples are judged one after another; False: concurrently, or many in one call."""
    needs_answer: bool
    """Whether the function has a parameter `answer` without a default."""


class Ready(msgspec.Struct, tag=True):
    """Message from a process to the pool: every reward is loaded."""

    rewards: dict[str, RewardsLoaded]


class RewardRefused(msgspec.Struct, tag=True):
    """Message from a process to the pool: a reward cannot be loaded, for a reason that the user can fix."""

    message: str


class Work(msgspec.Struct, tag=True):
    """Message from the pool to a process: samples to judge with one reward, each as the reward's arguments."""

    reward: str
    samples: list[dict[str, Any]]


class RewardAnswer(msgspec.Struct, array_like=True):
    """Result of the sample at `index`: `parts`, each (value, name, position), or else an `error`. Empty `parts`: the
    reward does not apply to the sample."""

    index: int
    parts: list[tuple[float, str, int]] | None = None
    error: str | None = None


class Answers(msgspec.Struct, tag=True):
    """Message from a process to the pool. If `last` is set, the process is free and hands unanswered samples back."""

    answers: list[RewardAnswer]
    last: bool


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_from_pool = msgspec.msgpack.Decoder(Setup | Work)
_from_process = msgspec.msgpack.Decoder(Ready | RewardRefused | Answers)


class Junk(ValueError):
    """Raised for bytes from a pipe that are not a message of this protocol."""


def frame(message: Setup | Work | Ready | RewardRefused | Answers) -> bytes:
    body = _encoder.encode(message)
    return HEAD.pack(MARK, len(body)) + body


def read_from_pool(pipe: BinaryIO) -> Setup | Work | None:
    """Waits for the next message and returns it; None if the pool closed the pipe or has ended."""
    return read_message(pipe, _from_pool)


def take_from_process(buffer: bytearray) -> Iterator[Ready | RewardRefused | Answers]:
    """Removes complete messages from the front of `buffer` and yields them; raises `Junk` if it holds anything else."""
    return take_messages(buffer, _from_process)


def read_message(pipe: BinaryIO, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Waits for the next message and returns it; None if the other side closed the pipe or has ended."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    _, length = HEAD.unpack(head)
    body = pipe.read(length)
    return decoder.decode(body) if len(body) == length else None


def take_messages(buffer: bytearray, decoder: msgspec.msgpack.Decoder[T]) -> Iterator[T]:
    """Removes complete messages from the front of `buffer` and yields them; raises `Junk` if it holds anything else."""
    start = 0
    while len(buffer) - start >= len(MARK):
        if not buffer.startswith(MARK, start):
            raise Junk
        if len(buffer) - start < HEAD.size:
            break
        _, length = HEAD.unpack_from(buffer, start)
        if length > MAX_BYTES:
            raise Junk
        end = start + HEAD.size + length
        if len(buffer) < end:
            break
        try:
            yield decoder.decode(bytes(buffer[start + HEAD.size : end]))
        except msgspec.MsgspecError as error:
            raise Junk from error
        start = end
    del buffer[:start]


def timeout_error(timeout_s: float) -> str:
    return f"timeout: no reward within {timeout_s:g} s (reward.timeout_s)"


class Moment(NamedTuple):
    num_begun: int
    """Samples begun since the process started."""
    begun_s: float
    """When the latest sample was begun, on the machine's monotonic clock."""


class Progress:
    """Memory shared by a process and its pool, mapped from a file. The process calls `begin`, the pool `read`."""

    SIZE = 16

    def __init__(self, descriptor: int):
        self._cell = mmap.mmap(descriptor, self.SIZE)
        self._counts, self._times = memoryview(self._cell).cast("Q"), memoryview(self._cell).cast("d")

    def begin(self, count: int = 1) -> None:
        self._times[1] = time.monotonic()
        self._counts[0] += count

    def read(self) -> Moment:
        return Moment(self._counts[0], self._times[1])

    def close(self) -> None:
        self._counts.release()
        self._times.release()
        self._cell.close()
