"""Messages between a worker and its vLLM process, and the frames that carry them through a Unix socket.

Both sides import this module: the process by its bare name, from a folder on its PYTHONPATH, and Offbeat as part of the
package. So it imports nothing of either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**30
"""Size of the largest frame that is accepted. The largest ones in use, a few megabytes, hold the handles of a big
model's tensors."""


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Asks for one answer, streamed as `Part`s."""

    id: str
    tokens: list[int]
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    salt: str
    """The engine shares cached prefixes only between calls with the same salt."""
    adapter: str = ""
    """Name of the adapter to use; "": none."""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Ends the answers with these ids; each keeps its tokens so far. An id that is not running is ignored."""

    ids: list[str]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """Asks the process to run its function `name`; the `Answer` has the same `number`."""

    number: int
    name: str
    arguments: dict[str, Any] = {}


class Part(msgspec.Struct, array_like=True, frozen=True):
    """A part of an answer."""

    id: str
    tokens: list[int] = []
    logprobs: list[float] = []
    finish: str = ""
    """Why the answer has ended, in the last part; "" in all others."""
    spans: list[tuple[str, int, int]] = []
    """In the last part: entries (label, start, end), each for tokens `start` to `end` (exclusive) of the answer, all
    sampled by the weights with this label."""
    num_cached: int | None = None
    """In the first part: input tokens whose keys and values were cached."""
    error: str = ""
    """Why the engine refused the request; "" if it did not."""


class Parts(msgspec.Struct, tag="parts", array_like=True, frozen=True):
    """Parts of several answers, all of the same decode step."""

    parts: list[Part]


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """Result of an `Ask`, or the error that it ended with."""

    number: int
    result: Any = None
    error: str = ""


_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(Generate | Abort | Ask)
from_engine = msgspec.msgpack.Decoder(Parts | Answer)


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Splits the bytes that a socket delivers into the bodies of frames."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Takes the next piece; yields each body that it completes."""
        self._begun += piece
        at = 0
        while len(self._begun) - at >= LENGTH_BYTES:
            first = at + LENGTH_BYTES
            length = int.from_bytes(self._begun[at:first], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"the other side sent a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                )
            if len(self._begun) - first < length:
                break
            at = first + length
            yield bytes(self._begun[first:at])
        del self._begun[:at]
