"""Probe of an engine's server: what it is and what it can do, by the very questions of a worker that attaches.

Guarantee: the server stays as it is. A worker may be using it, so nothing is sent that pauses, resumes or loads.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from offbeat.errors import UserError
from offbeat.launch.doctor.seen import EngineServer
from offbeat.launch.served import KEY_VARIABLE
from offbeat.rollout.engine import EngineError
from offbeat.rollout.engines.served.dialect import Facts
from offbeat.rollout.engines.served.http import CALL_WITHIN_S, Server, ServerAway, ServerRefused

DIALECTS = {"sglang": "SglangDialect", "vllm": "VllmDialect"}
"""The module of `offbeat.rollout.engines`, and its class."""
ANSWERS = {"sglang": ("/model_info", "model_path"), "vllm": ("/version", "version")}
"""What only this engine answers, and a key that its answer has."""
START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs, from 0.27 on with "
    "--enable-scale-out"
)
MAY_SEND = ("/generate", "/inference/v1/generate")
UNSENT = ("/continue_generation",)
"""Sent by a worker just in case, because SGLang does not tell whether it is paused."""


class Onlooker(Server):
    """A server that may be asked, not told."""

    async def post(self, path: str, body: Any = None, *, within_s: float = CALL_WITHIN_S, **query: str) -> Any:
        if path in UNSENT:
            return None
        if path not in MAY_SEND:
            raise EngineError(f"{self.url}: is paused: a worker loads weights, or died while it did; look again soon")
        return await super().post(path, body, within_s=within_s, **query)


def look_at_server(url: str) -> EngineServer:
    return asyncio.run(_look(url))


async def _look(url: str) -> EngineServer:
    server = Onlooker(url, api_key=os.environ.get(KEY_VARIABLE))
    try:
        kind = await _kind(server)
        module = importlib.import_module(f"offbeat.rollout.engines.{kind}")
        facts: Facts = await getattr(module, DIALECTS[kind])(server).probe()
    finally:
        await server.close()
    return EngineServer(
        url=server.url,
        name=facts.name,
        dtype=facts.dtype,
        max_context_tokens=facts.max_context_tokens,
        has_spans=facts.has_spans,
        has_labels=facts.has_labels,
        is_tempered=facts.is_tempered,
        kv_modes=sorted(facts.kv_modes),
        quantisation=facts.quantisation,
    )


async def _kind(server: Server) -> str:
    for kind, (path, key) in ANSWERS.items():
        try:
            said = await server.get(path)
        except ServerRefused:
            continue
        except ServerAway as error:
            raise UserError(f"{server.url}: no answer; start one, such as {START} ({error})") from error
        if isinstance(said, dict) and key in said:
            return kind
    raise UserError(f"{server.url}: answers, but neither as vLLM nor as SGLang does")
