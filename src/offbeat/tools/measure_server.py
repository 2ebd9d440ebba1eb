"""Times a running engine's server for calibration: decode steps over numbers of answers and contexts, and prefill.

The server needs OpenAI's `/v1/completions` with token ids as a prompt, as vLLM and SGLang have it. A decode step is
timed while all answers of a cell run: from the moment when the last of them has its first token to the moment when the
first of them ends. Prefill is the time to the first token of one prompt. Cells that the server cannot hold are left
out.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.engines.http_calls import Server, ServerAway, ServerRefused
from offbeat.engines.protocol import EngineError
from offbeat.errors import UserError
from offbeat.planner.cost.calibrate import Measurement

KEY = "OFFBEAT_ENGINE_KEY"
ROWS = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (512, 2048, 8192)
QUICK_ROWS, QUICK_CONTEXTS = (1, 8, 64), (512, 2048, 4096)
"""Sizes that are timed if none are given, and those of a quick sweep."""
PREFILLED = (1, 2, 4)
"""Lengths of the timed prefills, as multiples of the shortest context."""
STEPS = (48, 192, 768)
"""Tokens of each answer, of which those count that come while all answers run. Where the first answers end before the
last have begun, because prefill takes so long, longer ones are tried."""
LEAST_TIMED = 8
"""Smallest number of tokens of an answer, on average, in the time that counts."""
ROUNDS = 2
"""Number of times that each cell is timed; the fastest counts, because whatever disturbs only adds time."""
FIRST_TOKEN_ID = 1000
"""Ids below often have a meaning of their own, such as the end of an answer."""
CELL_WITHIN_S = 300.0

Told = Callable[[str], None]


@dataclass
class _Answer:
    """When the tokens of an answer came, as pairs of a moment and the number of tokens up to then."""

    came: list[tuple[float, int]] = field(default_factory=list)

    def count(self, until_s: float) -> int:
        return max((num for at_s, num in self.came if at_s <= until_s), default=0)


class _Client:
    def __init__(self, server: Server, model: str, vocab: int, seed: int = 0):
        self.server, self.model, self.vocab, self.draw = server, model, vocab, random.Random(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens, so that no cached prefix of another prompt is used."""
        low = min(FIRST_TOKEN_ID, self.vocab // 2)
        return [self.draw.randrange(low, self.vocab) for _ in range(num_tokens)]

    async def answer(self, prompt: Sequence[int], num_tokens: int) -> _Answer:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        found, num = _Answer(), 0
        async for event in self.server.events("/v1/completions", body):
            if event == b"[DONE]":
                break
            said: dict[str, Any] = msgspec.json.decode(event)
            if said.get("error"):
                raise EngineError(f"{self.server.url}: {said['error']}")
            usage = said.get("usage") or {}
            if said.get("choices"):
                num = usage.get("completion_tokens") or num + 1
                found.came.append((time.perf_counter(), num))
        if num < num_tokens:
            raise EngineError(
                f"{self.server.url}: an answer ended after {num} of {num_tokens} tokens, so its time cannot be "
                "measured; the server must heed ignore_eos and have a context long enough for it"
            )
        return found

    async def decode_s(self, rows: int, context: int, num_tokens: int) -> tuple[float, float] | None:
        """Seconds of a decode step of `rows` answers, and their mean context in the steps that were timed; None if they
        did not all run at once."""
        prompts = [self.prompt(context) for _ in range(rows)]
        async with asyncio.timeout(CELL_WITHIN_S):
            answers = await asyncio.gather(*(self.answer(prompt, num_tokens) for prompt in prompts))
        from_s = max(answer.came[0][0] for answer in answers)
        until_s = min(answer.came[-1][0] for answer in answers)
        before = sum(answer.count(from_s) for answer in answers) / rows
        after = sum(answer.count(until_s) for answer in answers) / rows
        if after - before < LEAST_TIMED:
            return None
        return (until_s - from_s) / (after - before), context + (before + after) / 2

    async def prefill_s(self, context: int) -> float:
        prompt = self.prompt(context)
        started_s = time.perf_counter()
        async with asyncio.timeout(CELL_WITHIN_S):
            answer = await self.answer(prompt, 1)
        return answer.came[0][0] - started_s


def measure_server(
    url: str,
    name: str,
    vocab: int,
    tp: int = 1,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    tell: Told = print,
) -> list[Measurement]:
    """Times the server at `url` on accelerators called `name`, `tp` for each replica. `vocab` is the number of tokens
    of its model. `tell` takes a line for each cell."""
    return asyncio.run(_measure(url, name, vocab, tp, rows, contexts, tell))


async def _measure(
    url: str, name: str, vocab: int, tp: int, rows: Sequence[int], contexts: Sequence[int], tell: Told
) -> list[Measurement]:
    server = Server(url, api_key=os.environ.get(KEY))
    try:
        model, longest = await _model_of(server)
        client = _Client(server, model, vocab)
        fitting = [context for context in contexts if longest is None or context + STEPS[0] <= longest]
        if not fitting:
            raise UserError(f"{url}: its longest context is {longest} tokens; give a smaller one with --contexts")
        await client.answer(client.prompt(fitting[0]), STEPS[0])  # warms up
        found = []
        for context in fitting:
            for num in rows:
                lengths = [length for length in STEPS if longest is None or context + length <= longest]
                cell = await _cell(client, num, context, lengths, tell)
                if cell is None:
                    break  # more rows need even more room
                seconds, mean = cell
                tell(f"{num} answers at {mean:,.0f} tokens: {seconds * 1e3:.2f} ms a step")
                found.append(Measurement("decode", name, seconds, rows=num, context=mean, tp=tp))
        if not found:
            raise UserError(f"{url}: no cell could be timed; see the lines above")
        for times in PREFILLED:
            length = fitting[0] * times
            if longest is None or length < longest:
                seconds = min([await client.prefill_s(length) for _ in range(ROUNDS)])
                tell(f"a prompt of {length:,} tokens: {seconds * 1e3:.1f} ms")
                found.append(Measurement("prefill", name, seconds, tokens=length, sum_square_tokens=length**2, tp=tp))
        return found
    except (ServerAway, ServerRefused) as error:
        raise UserError(_remedy(str(error), error)) from None
    except EngineError as error:
        raise UserError(str(error)) from None
    finally:
        await server.close()


def _remedy(text: str, error: EngineError) -> str:
    if isinstance(error, ServerRefused) and error.status in (401, 403):
        return f"{text}; set the server's key in {KEY}"
    if isinstance(error, ServerRefused) and error.status == 404:
        return f"{text}; --engine needs a server with /v1/models and /v1/completions, such as vLLM's"
    return f"{text}; check that --engine is the address of a running server"


async def _model_of(server: Server) -> tuple[str, int | None]:
    """Name of the server's model, and the longest context if the server tells it."""
    try:
        (model, *_) = (await server.get("/v1/models"))["data"]
        longest = model.get("max_model_len")
        return str(model["id"]), None if longest is None else int(longest)
    except (LookupError, TypeError, ValueError):
        raise UserError(f"{server.url}: /v1/models does not answer as OpenAI's API does; check --engine") from None


async def _cell(
    client: _Client, rows: int, context: int, lengths: Sequence[int], tell: Told
) -> tuple[float, float] | None:
    """Times a cell; None, with a line that says why, if the server cannot run all its answers at once."""
    try:
        for num_tokens in lengths:
            timed = [await client.decode_s(rows, context, num_tokens) for _ in range(ROUNDS)]
            if whole := [each for each in timed if each is not None]:
                return min(whole)
    except (ServerRefused, TimeoutError, ServerAway) as error:
        if isinstance(error, ServerRefused) and error.status in (401, 403, 404):
            raise
        why = f"no answer within {CELL_WITHIN_S:g} s" if isinstance(error, TimeoutError) else str(error)
        tell(f"{rows} answers at {context:,} tokens: left out, {why}")
        return None
    tell(f"{rows} answers at {context:,} tokens: left out, the server did not run all of them at once")
    return None
