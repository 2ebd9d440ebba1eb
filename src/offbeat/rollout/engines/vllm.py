"""vLLM's own HTTP API, as `Dialect`: 0.26, which can neither name its weights nor tell which tokens came from which,
and later ones that can.

A server wants `VLLM_SERVER_DEV_MODE=1` for its control calls, and `--logprobs-mode processed_logprobs`, so that
log-probs are those after temperature. Its control calls ask for no key: it must listen where nobody else can reach it,
such as at a socket (`unix:PATH` is its URL then).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offbeat.rollout.engine import EngineError, Finish, KvMode
from offbeat.rollout.engines.served.dialect import Call, Chunk, Facts, Span
from offbeat.rollout.engines.served.http import NOT_JSON, Server, ServerRefused
from offbeat.rollout.engines.vllm_files import LOAD_WITHIN_S, FromPath, Transfer
from offbeat.weights.version import Version

EXTENSION = "offbeat_in_vllm.Extension"
EXTENSION_FOLDER = Path(__file__).parent / "inside_vllm"
"""What a server is started with: a class, and where it is found."""
ON_CPU_FOLDER = EXTENSION_FOLDER / "on_cpu"
"""Where its processes find what they are to import besides, on a machine without a GPU."""
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""What a server without a GPU is started with: it draws a token for each part of a prompt that it splits, and ends
where it cannot take the draw back, as with a seed on a CPU."""
GENERATE = "/inference/v1/generate"
RUNS_AS = "generate-tokens-"
"""What the server puts before the id of a call; an abort of the bare id is acknowledged and ends nothing."""
STREAM_TOKENS = 32
"""Tokens in one event: fewer cost the server more than the tokens do, more come late."""
LOOK_WITHIN_S = 10.0
INFO_WITHIN_S = 120.0
"""The first time, the server looks its whole machine over."""
NO_LOGPROB = -9998.0
"""Log-probs below this stand for one that the server does not have."""
TIED = re.compile(r"tie_word_embeddings['\"]?[:=] *[Tt]rue")
SPLITS = re.compile(r"enable_chunked_prefill['\"]?[:=] *[Tt]rue")
BORN = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)


class VllmDialect:
    """Implements `offbeat.rollout.engines.served.dialect.Dialect`."""

    def __init__(self, server: Server, transfer: Transfer | None = None):
        self.server, self.transfer = server, transfer or FromPath()
        self._model, self._root = "", ""
        """The weights that it was started with: what they are called, and where they came from."""
        self._has_labels = False
        self._packs = False
        """Whether the server was started with our own mends."""
        self._more: dict[str, Any] = {}
        """Sampling parameters that only newer servers know."""

    async def probe(self) -> Facts:
        with self._speaking_vllm():
            release = str((await self.server.get("/version"))["version"])
            (model, *_) = (await self.server.get("/v1/models"))["data"]
            self._model, max_context_tokens = str(model["id"]), int(model["max_model_len"])
            self._root = str(model.get("root") or "")
            await self._wake()
            info = await self.server.get("/server_info", within_s=INFO_WITHIN_S, config_format="json")
            told = dict(info["vllm_config"]["model_config"])
        if (mode := told.get("logprobs_mode")) != "processed_logprobs":
            raise EngineError(
                f"{self.server.url}: log-probs are {mode}, before temperature; start vLLM with --logprobs-mode "
                "processed_logprobs"
            )
        self._packs = EXTENSION in str(info["vllm_config"].get("parallel_config"))
        self._refuse_split_prompts(info["vllm_config"])
        await self._refuse_weights(info["vllm_config"])
        self._has_labels = await self._can_label()
        has_spans = self._has_labels and await self._sends_spans()
        if has_spans:
            self._more = {"stream_interval": STREAM_TOKENS}
        modes = {KvMode.SAME, KvMode.REFILL} | ({KvMode.STALE} if has_spans else set())
        return Facts(
            name=f"vllm {release}",
            dtype=str(told.get("dtype", "")).removeprefix("torch."),
            max_context_tokens=max_context_tokens,
            has_spans=has_spans,
            has_labels=self._has_labels,
            kv_modes=frozenset(modes),
            quantisation=told.get("quantization") or "",
        )

    async def _refuse_weights(self, told: Mapping[str, Any]) -> None:
        """Refuses a server that cannot be given versions."""
        if _is_on_cpu(told) and TIED.search(str(told.get("model_config"))) and not self._packs:
            raise EngineError(
                f"{self.server.url}: vLLM on a CPU keeps the old output layer after a load where it shares the "
                "embedding's weights; leave engine.url out, and the worker starts a server that does not"
            )

    def _refuse_split_prompts(self, told: Mapping[str, Any]) -> None:
        if _is_on_cpu(told) and SPLITS.search(str(told.get("scheduler_config"))):
            raise EngineError(
                f"{self.server.url}: vLLM on a CPU ends when it splits the prompt of a call with a seed; start it with "
                f"{WHOLE_PROMPTS}"
            )

    @contextmanager
    def _speaking_vllm(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.server.url}: answers, but not as vLLM does; is it another server?") from error

    async def _wake(self) -> None:
        """Someone may have gone between a pause and its end."""
        try:
            if (await self.server.get("/is_paused"))["is_paused"]:
                await self.resume()
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise EngineError(
                f"{self.server.url}: vLLM without its control calls; start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, where nobody else can reach it"
            ) from error

    async def _can_label(self) -> bool:
        try:
            await self.server.get("/weight_info")
        except ServerRefused as error:
            if error.status != 404:
                raise
            return False
        return True

    async def _sends_spans(self) -> bool:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "ignore_eos": True}, "model": self._model}
        try:
            answer = await self.server.post(GENERATE, body, within_s=INFO_WITHIN_S)
        except ServerRefused as error:
            if error.status != 403:
                raise
            raise EngineError(
                f"{self.server.url}: vLLM without its token interface; start it with --enable-scale-out"
            ) from error
        return bool(answer["choices"][0].get("weight_versions"))

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        sampling = call.sampling
        body = {
            "request_id": call.id,
            "model": self._name_of(call),
            "token_ids": call.tokens,
            "stream": True,
            "cache_salt": call.salt,
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "seed": call.seed,
                "logprobs": 0,
                "stop_token_ids": sampling.stop_token_ids,
                "ignore_eos": True,
                "detokenize": False,
                **self._more,
            },
        }
        last: Chunk | None = None
        async with aclosing(self.server.events(GENERATE, body)) as events:  # type: ignore[type-var]
            async for event in events:  # to its very end, so that its connection can be used again
                if event == b"[DONE]":
                    # In older servers an abort with no token since the last event has none of its own.
                    last = last or Chunk(finish=Finish.ABORT)
                elif (chunk := self._read(event)) is not None:
                    if chunk.finish is None:
                        yield chunk
                    else:
                        last = chunk
        if last is not None:
            yield last

    def _name_of(self, call: Call) -> str:
        """What the weights are called that are to answer a call."""
        return self._model

    def _read(self, event: bytes) -> Chunk | None:
        try:
            said = _EVENT.decode(event)
        except NOT_JSON as error:
            raise EngineError(f"{self.server.url}{GENERATE}: {error}: {event[:300]!r}") from error
        if said.error is not None:
            raise ServerRefused(f"{self.server.url}{GENERATE}: {said.error}", 500)
        if not said.choices:
            return None
        choice = said.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        if logprobs and min(logprobs) < NO_LOGPROB:
            raise EngineError(f"{self.server.url}{GENERATE}: no log-prob for a sampled token")
        finish = None
        if choice.finish_reason is not None:
            try:
                finish = Finish(choice.finish_reason)
            except ValueError as error:
                raise EngineError(f"{self.server.url}{GENERATE}: ended by {choice.finish_reason!r}") from error
        spans = tuple(Span(span.version, span.start, span.end) for span in choice.weight_versions or ())
        return Chunk(choice.token_ids or (), logprobs, finish, spans)

    async def abort(self, ids: Sequence[str]) -> None:
        await self.server.post("/abort_requests", {"request_ids": [RUNS_AS + name for name in ids]})

    async def pause(self, *, keeps_kv: bool) -> None:
        await self.server.post(
            "/pause", within_s=LOAD_WITHIN_S, mode="keep", clear_cache="false" if keeps_kv else "true"
        )

    async def stage(self, version: Version) -> None:
        await self.transfer.stage(version)

    async def load(self, version: Version, label: str) -> None:
        await self._replace(version, label)
        if self._has_labels:  # before anything is sampled: a load does not change what weights are called
            await self.server.post("/update_weight_version", {"new_version": label})

    async def _replace(self, version: Version, label: str) -> None:
        await self.transfer.load(self.server, version)
        if self._packs:
            await self.server.post("/collective_rpc", {"method": "offbeat_pack_head"}, within_s=LOAD_WITHIN_S)

    async def resume(self) -> None:
        await self.server.post("/resume")

    async def label(self) -> str:
        if self._has_labels:
            return str((await self.server.get("/weight_info", within_s=LOOK_WITHIN_S))["weight_version"])
        found = BORN.search(await self.server.text("/metrics", within_s=LOOK_WITHIN_S))
        return f"started {found.group(1)}" if found else ""

    async def check(self) -> None:
        await self.server.get("/health", within_s=LOOK_WITHIN_S)

    async def close(self) -> None:
        await self.server.close()


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


def _is_on_cpu(told: Mapping[str, Any]) -> bool:
    return "cpu" in str(told.get("device_config"))
