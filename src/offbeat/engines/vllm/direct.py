"""`Dialect` for vLLM in a process that the worker starts and reaches through a Unix socket.

The process runs `inside/offbeat_vllm_process.py`. There is no HTTP, no JSON and no second process between the worker
and the engine. A vLLM that the user runs (engine.url) is reached through its HTTP server instead (`vllm.api`). With
every release of vLLM, the process reports which weights sampled which tokens, and can keep the keys and values of
running requests across a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from offbeat.engines.dialect import Call, Chunk, Facts, Span
from offbeat.engines.http_calls import CALL_WITHIN_S, NO_LISTENER, UNIX, ServerAway
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.engines.vllm.api import CHECK_WITHIN_S, PACK_HEAD
from offbeat.engines.vllm.inside.offbeat_frames import Abort, Answer, Ask, Frames, Generate, Part, frame, from_engine
from offbeat.engines.vllm.lora import Adapters
from offbeat.engines.vllm.weights import LOAD_WITHIN_S, FromPath, Transfer
from offbeat.weights.version import Version

READ_BYTES = 2**20
MODULE = "offbeat_vllm_process"
"""Module in `EXTENSION_FOLDER` that the process runs."""


class Channel:
    """Connection to a vLLM process; opened by the first message. Once it has broken or was closed, every call raises
    `ServerAway`: a process that has ended does not come back at its socket."""

    def __init__(self, url: str):
        """`url` names the Unix socket of the process, such as "unix:/tmp/engine"."""
        self.url = url
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._parts: dict[str, asyncio.Queue[Part | None]] = {}
        """For each call, the parts that have come; None: no more will come."""
        self._broken: ServerAway | None = None

    async def ask(self, name: str, /, *, within_s: float = CALL_WITHIN_S, **arguments: Any) -> Any:
        """Makes the process run its function `name` with `arguments`; returns the result. To get tokens, call
        `generate` instead."""
        number = next(self._numbers)
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                await self._send(Ask(number, name, arguments))
                answer = await answered
        except TimeoutError as error:
            raise ServerAway(f"{self.url}: vLLM's process gave no answer within {within_s:g} s to {name!r}") from error
        finally:
            del self._asked[number]
        if answer.error:
            raise EngineError(f"{self.url}: vLLM's process failed at {name!r}: {answer.error}")
        return answer.result

    async def generate(self, message: Generate) -> AsyncIterator[Part]:
        """Yields the parts of an answer; closing the iterator ends the answer."""
        parts = self._parts[message.id] = asyncio.Queue()
        is_over = False
        try:
            await self._send(message)
            while not is_over:
                if (part := await parts.get()) is None:
                    raise self._away()
                is_over = bool(part.finish or part.error)
                yield part
        finally:
            del self._parts[message.id]
            if not is_over:
                with suppress(ServerAway):
                    self._write(Abort([message.id]))

    async def abort(self, ids: Sequence[str]) -> None:
        await self._send(Abort(list(ids)))

    async def close(self) -> None:
        self._break(ServerAway(f"{self.url}: the connection to vLLM's process is closed"))
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _send(self, message: Generate | Abort | Ask) -> None:
        async with self._opening:
            if self._writer is None and self._broken is None:
                await self._open()
        self._write(message)

    async def _open(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(self.url.removeprefix(UNIX))
        except OSError as error:
            is_refused = isinstance(error, NO_LISTENER)
            raise ServerAway(f"{self.url}: vLLM's process cannot be reached: {error}", is_refused=is_refused) from error
        self._reading = asyncio.ensure_future(self._read(reader))

    def _write(self, message: Generate | Abort | Ask) -> None:
        if self._broken is not None or self._writer is None:
            raise self._away()
        self._writer.write(frame(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Passes each message of the process to the caller that waits for it, until the connection ends."""
        frames, why = Frames(), "it has ended"
        try:
            while piece := await reader.read(READ_BYTES):
                for body in frames.feed(piece):
                    self._hand_out(body)
        except (OSError, ValueError) as error:
            why = str(error)
        self._break(ServerAway(f"{self.url}: vLLM's process does not answer any more: {why}", is_refused=True))

    def _hand_out(self, body: bytes) -> None:
        message = from_engine.decode(body)
        if isinstance(message, Answer):
            answered = self._asked.get(message.number)
            if answered is not None and not answered.done():
                answered.set_result(message)
            return
        for part in message.parts:
            if (parts := self._parts.get(part.id)) is not None:  # else nobody waits for it any more
                parts.put_nowait(part)

    def _break(self, error: ServerAway) -> None:
        self._broken = self._broken or error
        if self._writer is not None:
            self._writer.close()
        for answered in self._asked.values():
            if not answered.done():
                answered.set_exception(self._away())
        for parts in self._parts.values():
            parts.put_nowait(None)

    def _away(self) -> ServerAway:
        """Returns a copy of the error that broke the connection; raising the same object again would lengthen its
        traceback."""
        assert self._broken is not None, "nothing was sent yet"
        return ServerAway(str(self._broken), is_refused=self._broken.is_refused)


class DirectDialect:
    """Implements `offbeat.engines.dialect.Dialect` for a vLLM process, in a run that trains all weights.
    `DirectLoraDialect` is for runs that train adapters."""

    def __init__(self, channel: Channel, transfer: Transfer | None = None):
        self.channel = channel
        self.transfer: Transfer = transfer or FromPath()
        self._is_on_cpu = False

    async def probe(self) -> Facts:
        facts = await self.channel.ask("facts")
        if (mode := facts["logprobs_mode"]) != "processed_logprobs":
            raise EngineError(
                f"engine.arguments: --logprobs-mode {mode} is given, but log-probs after temperature are needed; leave "
                "this option out"
            )
        self._is_on_cpu = facts["is_on_cpu"]
        await self.resume()  # an earlier engine of this worker may have been cut off in a load
        return Facts(
            name=f"vllm {facts['release']}",
            dtype=facts["dtype"],
            max_context_tokens=facts["max_context_tokens"],
            has_spans=True,
            has_labels=True,
            kv_modes=frozenset(KvMode),
            quantisation=facts["quantisation"],
        )

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        sampling = call.sampling
        message = Generate(
            id=call.id,
            tokens=list(call.tokens),
            seed=call.seed,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            salt=call.salt,
            adapter=self._adapter_for(call),
        )
        async with aclosing(self.channel.generate(message)) as parts:  # type: ignore[type-var]
            async for part in parts:
                yield self._chunk(part)

    def _adapter_for(self, call: Call) -> str:
        """Returns the name of the adapter that samples the call's answer; "": none."""
        return ""

    def _chunk(self, part: Part) -> Chunk:
        if part.error:
            raise EngineError(f"{self.channel.url}: vLLM's process refused the request: {part.error}")
        try:
            finish = Finish(part.finish) if part.finish else None
        except ValueError as error:
            raise EngineError(
                f"{self.channel.url}: vLLM ended an answer for an unknown reason: {part.finish}"
            ) from error
        spans = [Span(label, start, end) for label, start, end in part.spans]
        return Chunk(part.tokens, part.logprobs, finish, spans, part.num_cached)

    async def abort(self, ids: Sequence[str]) -> None:
        await self.channel.abort(ids)

    async def pause(self, *, keeps_kv: bool) -> None:
        await self.channel.ask("pause", within_s=LOAD_WITHIN_S, keeps_kv=keeps_kv)

    async def stage(self, version: Version) -> None:
        await self.transfer.stage(version)

    async def load(self, version: Version, label: str) -> None:
        await self.transfer.load(self._call_workers, version)
        if self._is_on_cpu:
            await self._call_workers(PACK_HEAD)
        await self.channel.ask("rename", label=label)

    async def _call_workers(self, method: str, /, **arguments: Any) -> None:
        await self.channel.ask("call", within_s=LOAD_WITHIN_S, method=method, arguments=arguments)

    async def resume(self) -> None:
        await self.channel.ask("resume")

    async def label(self) -> str:
        return str(await self.channel.ask("label", within_s=CHECK_WITHIN_S))

    async def check(self) -> None:
        """Does nothing: no separate health check is needed, because a reply to `label` already shows that the process
        works."""

    async def close(self) -> None:
        await self.channel.close()


class DirectLoraDialect(DirectDialect):
    """Implements `offbeat.engines.dialect.Dialect` for a run that trains adapters; see `vllm.lora`."""

    def __init__(self, channel: Channel, folder: Path):
        """`folder` is for adapter files and must belong to this dialect alone."""
        super().__init__(channel)
        self.adapters = Adapters(folder, self._add, self._remove)

    async def probe(self) -> Facts:
        facts = await super().probe()
        await self.adapters.clean_up()
        # A call uses the adapter that it names, whatever is loaded meanwhile.
        return replace(facts, has_spans=False, has_labels=False, kv_modes=frozenset({KvMode.SAME, KvMode.REFILL}))

    def _adapter_for(self, call: Call) -> str:
        return self.adapters.name_for(call)

    async def stage(self, version: Version) -> None:
        await self.adapters.stage(version)

    async def load(self, version: Version, label: str) -> None:
        await self.adapters.swap(version, label)

    async def _add(self, name: str, folder: Path) -> None:
        await self.channel.ask("add_adapter", within_s=LOAD_WITHIN_S, name=name, folder=str(folder))

    async def _remove(self, name: str) -> None:
        await self.channel.ask("remove_adapter", within_s=CHECK_WITHIN_S, name=name)

    async def close(self) -> None:
        await self.adapters.close()
        await super().close()
