"""Two clients: Offbeat's engine, and a naive client of a server with a thread and a connection per request."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np

from benchmarks.common.vllm_http import SERVED_NAME
from benchmarks.engines.processes import BATCH_WITHIN_S
from benchmarks.engines.work import Batch, Done, checked
from offbeat.engines.http_calls import UNIX
from offbeat.engines.protocol import Engine, Finish, Request
from offbeat.errors import OffbeatError
from offbeat.trajectory import Sampling


async def through_engine(engine: Engine, way: str, batch: Batch) -> Done:
    """Generates through Offbeat's engine, as a worker does."""
    requests = iter(requests_of(batch))
    num_tokens = num_logprobs = 0

    async def one_after_another() -> None:
        nonlocal num_tokens, num_logprobs
        for request in requests:
            generation = await engine.generate(request)
            if generation.finish is not Finish.LENGTH:
                raise OffbeatError(f"{way}: request {request.id} ended by {generation.finish.value}")
            for segment in generation.segments:
                assert segment.logprobs is not None
                num_tokens += len(segment.tokens)
                num_logprobs += len(segment.logprobs)

    start_s = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*(one_after_another() for _ in range(batch.num_at_once))), BATCH_WITHIN_S)
    return checked(way, batch, Done(time.perf_counter() - start_s, num_tokens, num_logprobs))


def requests_of(batch: Batch) -> Iterator[Request]:
    sampling = Sampling(max_new_tokens=batch.num_tokens)
    for prompt, seed in zip(batch.prompts, batch.seeds, strict=True):
        yield Request(uuid4().hex, np.array(prompt, np.int32), seed, sampling)


def naive(url: str, batch: Batch) -> Done:
    def ask(prompt: list[int], seed: int) -> tuple[int, int]:
        sampling = {"max_tokens": batch.num_tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True, "logprobs": 0}
        body = {"model": SERVED_NAME, "token_ids": prompt, "sampling_params": {**sampling, "detokenize": False}}
        connection = _connection(url)
        try:
            connection.request("POST", "/inference/v1/generate", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise OffbeatError(f"naive client: {answer.status}: {said[:300].decode(errors='replace')}")
        choice = json.loads(said)["choices"][0]
        return len(choice["token_ids"]), len(choice["logprobs"]["content"])

    with ThreadPoolExecutor(batch.num_at_once) as threads:
        start_s = time.perf_counter()
        counts = list(threads.map(ask, batch.prompts, batch.seeds))
        seconds = time.perf_counter() - start_s
    return checked("naive client", batch, Done(seconds, sum(c[0] for c in counts), sum(c[1] for c in counts)))


def _connection(url: str) -> http.client.HTTPConnection:
    if not url.startswith(UNIX):
        address = urlsplit(url)
        return http.client.HTTPConnection(address.hostname or "", address.port, timeout=BATCH_WITHIN_S)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(BATCH_WITHIN_S)
    connection.sock.connect(url.removeprefix(UNIX))
    return connection
