"""A vLLM process whose answers a test writes: it speaks the real frames through a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from offbeat.engines.vllm.inside.offbeat_frames import (
    Abort,
    Answer,
    Ask,
    Frames,
    Generate,
    Part,
    Parts,
    frame,
    to_engine,
)

Message = Generate | Abort | Ask
FACTS = {
    "release": "0.26.0",
    "dtype": "bfloat16",
    "quantisation": "",
    "max_context_tokens": 2048,
    "logprobs_mode": "processed_logprobs",
    "is_on_cpu": False,
    "lora_rank": 0,
}


class ScriptedProcess:
    """Answers with what `script` returns for a message, besides `facts` and empty answers to all that is asked."""

    def __init__(self, url: str, script: Callable[[Message], Iterable[msgspec.Struct]]):
        self.url, self.script = url, script
        self.facts = dict(FACTS)
        self.received: list[Message] = []
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def asked(self) -> list[tuple[str, dict]]:
        return [(message.name, message.arguments) for message in self.received if isinstance(message, Ask)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        frames = Frames()
        while piece := await reader.read(100):
            for body in frames.feed(piece):
                message = to_engine.decode(body)
                self.received.append(message)
                self.say(*(list(self.script(message)) or self.usual(message)))

    def usual(self, message: Message) -> Iterable[msgspec.Struct]:
        if isinstance(message, Ask):
            yield Answer(message.number, self.facts if message.name == "facts" else None)

    def say(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self.writers[-1].write(frame(message))

    def end(self) -> None:
        for writer in self.writers:
            writer.close()


def whole(message: Generate, *, label: str = "a") -> Parts:
    """A complete answer of one token."""
    return Parts([Part(message.id, [7], [-0.5], "length", [(label, 0, 1)], num_cached=0)])


@asynccontextmanager
async def scripted_process(
    folder: Path, script: Callable[[Message], Iterable[msgspec.Struct]] = lambda message: ()
) -> AsyncIterator[ScriptedProcess]:
    path = folder / "engine"
    process = ScriptedProcess(f"unix:{path}", script)
    server = await asyncio.start_unix_server(process.serve, path)
    try:
        yield process
    finally:
        process.end()
        server.close()
