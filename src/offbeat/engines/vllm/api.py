"""vLLM's HTTP API as a `Dialect`, for releases from 0.26 on. Release 0.26 does not label its weights, nor report spans
(which weights sampled which tokens).

A server needs `VLLM_SERVER_DEV_MODE=1` for its control calls, and `--logprobs-mode processed_logprobs` so that
log-probs are those after temperature. Control calls need no key, so the server must listen where only this user can
reach it, such as at a Unix socket (URL `unix:PATH`). Without a GPU, vLLM also needs two workarounds (`inside/`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from offbeat.engines.dialect import STREAM_TOKENS, Call, Chunk, Facts, Span, read_event
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.engines.vllm.weights import LOAD_WITHIN_S, FromPath, Transfer
from offbeat.weights.version import Version

EXTENSION = "offbeat_in_vllm.Extension"
EXTENSION_FOLDER = Path(__file__).parent / "inside"
"""Folder of `EXTENSION`, the worker extension that servers are started with."""
PACK_HEAD = "offbeat_pack_head"
"""Method of `EXTENSION` that packs the output layer's weights again; to be called after a load."""
ON_CPU_FOLDER = EXTENSION_FOLDER / "on_cpu"
"""Folder added to the PYTHONPATH of a server's processes on a machine without a GPU."""
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""Option needed without a GPU: vLLM on a CPU crashes when it splits the prompt of a call with a seed."""
GENERATE = "/inference/v1/generate"
RUNS_AS = "generate-tokens-"
"""Prefix that the server adds to a call's id. An abort must include it: an abort of the bare id succeeds but ends
nothing."""
CHECK_WITHIN_S = 10.0
INFO_WITHIN_S = 120.0
"""Deadline of calls during the probe; the first one makes the server inspect its whole machine."""
NO_LOGPROB = -9998.0
"""A log-prob below this means that the server has no log-prob for the token."""
TIED = re.compile(r"tie_word_embeddings['\"]?[:=] *[Tt]rue")
SPLITS = re.compile(r"enable_chunked_prefill['\"]?[:=] *[Tt]rue")
START_TIME = re.compile(r"^process_start_time_seconds ([0-9.e+]+)$", re.MULTILINE)


class VllmDialect:
    """Implements `offbeat.engines.dialect.Dialect` for a vLLM server, in a run that trains all weights. `LoraDialect`
    is for runs that train adapters."""

    def __init__(self, server: Server, transfer: Transfer | None = None):
        self.server = server
        self.transfer: Transfer = transfer or FromPath()
        self._model, self._root = "", ""
        """Name and path of the weights that the server was started with."""
        self._has_labels = False
        self._has_extension = False
        """Whether the server was started with `EXTENSION`."""
        self._more: dict[str, Any] = {}
        """Further sampling parameters, which only newer servers accept."""

    async def probe(self) -> Facts:
        try:
            release = str((await self.server.get("/version"))["version"])
            (model, *_) = (await self.server.get("/v1/models"))["data"]
            self._model, max_context_tokens = str(model["id"]), int(model["max_model_len"])
            self._root = str(model.get("root") or "")
            await self._wake()
            info = await self.server.get("/server_info", within_s=INFO_WITHIN_S, config_format="json")
            config = info["vllm_config"]
            model_config = dict(config["model_config"])
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.server.url}: the server answers, but not like vLLM; check engine.url") from error
        if (mode := model_config.get("logprobs_mode")) != "processed_logprobs":
            raise EngineError(
                f"{self.server.url}: the server's logprobs_mode is {mode}, but log-probs after temperature are needed; "
                "start vLLM with --logprobs-mode processed_logprobs"
            )
        self._has_extension = EXTENSION in str(config.get("parallel_config"))
        self._refuse_split_prompts(config)
        await self._refuse_weights(config)
        self._has_labels = await self._can_label()
        has_spans = self._has_labels and await self._sends_spans()
        if has_spans:
            self._more = {"stream_interval": STREAM_TOKENS}
        modes = {KvMode.SAME, KvMode.REFILL} | ({KvMode.STALE} if has_spans else set())
        return Facts(
            name=f"vllm {release}",
            dtype=str(model_config.get("dtype", "")).removeprefix("torch."),
            max_context_tokens=max_context_tokens,
            has_spans=has_spans,
            has_labels=self._has_labels,
            kv_modes=frozenset(modes),
            quantisation=model_config.get("quantization") or "",
        )

    async def _refuse_weights(self, config: Mapping[str, Any]) -> None:
        """Raises an `EngineError` if a server with this `config` cannot load new versions of the weights correctly."""
        if _is_on_cpu(config) and TIED.search(str(config.get("model_config"))) and not self._has_extension:
            raise EngineError(
                f"{self.server.url}: after a load, vLLM on a CPU would keep the old output layer, because that "
                "layer shares the embedding's weights; leave out engine.url, so that the worker starts a server itself"
            )

    def _refuse_split_prompts(self, config: Mapping[str, Any]) -> None:
        if _is_on_cpu(config) and SPLITS.search(str(config.get("scheduler_config"))):
            raise EngineError(
                f"{self.server.url}: vLLM on a CPU crashes when it splits the prompt of a call with a seed; start it "
                f"with {WHOLE_PROMPTS}"
            )

    async def _wake(self) -> None:
        """Resumes a server that an earlier worker left paused."""
        try:
            if (await self.server.get("/is_paused"))["is_paused"]:
                await self.resume()
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise EngineError(
                f"{self.server.url}: this vLLM has no control calls; start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, at an address that only this user can reach"
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
                f"{self.server.url}: this vLLM refuses calls that send token ids; start it with --enable-scale-out"
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
            async for event in events:  # to the end of the stream, so that its connection can be reused
                if event == b"[DONE]":
                    # Older servers send no event for an abort if no token was sampled since the last event.
                    last = last or Chunk(finish=Finish.ABORT)
                elif (chunk := self._read(event)) is not None:
                    if chunk.finish is None:
                        yield chunk
                    else:
                        last = chunk
        if last is not None:
            yield last

    def _name_of(self, call: Call) -> str:
        """Returns the model name to send with a call; the server selects the weights by this name."""
        return self._model

    def _read(self, event: bytes) -> Chunk | None:
        answer = read_event(self.server, GENERATE, _EVENT, event)
        if answer.error is not None:
            raise ServerRefused(f"{self.server.url}{GENERATE}: server error: {answer.error}", 500)
        if not answer.choices:
            return None
        choice = answer.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        if logprobs and min(logprobs) < NO_LOGPROB:
            raise EngineError(f"{self.server.url}{GENERATE}: the server sent no log-prob for a sampled token")
        finish = None
        if choice.finish_reason is not None:
            try:
                finish = Finish(choice.finish_reason)
            except ValueError as error:
                raise EngineError(
                    f"{self.server.url}{GENERATE}: unknown finish reason {choice.finish_reason!r}"
                ) from error
        return Chunk(choice.token_ids or (), logprobs, finish, tuple(choice.weight_versions or ()))

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
        if self._has_labels:  # a load does not change the label; set it before anything is sampled
            await self.server.post("/update_weight_version", {"new_version": label})

    async def _replace(self, version: Version, label: str) -> None:
        await self.transfer.load(self._call_workers, version)
        if self._has_extension:
            await self._call_workers(PACK_HEAD)

    async def _call_workers(self, method: str, /, **arguments: Any) -> None:
        body = {"method": method, "kwargs": arguments}
        await self.server.post("/collective_rpc", body, within_s=LOAD_WITHIN_S)

    async def resume(self) -> None:
        await self.server.post("/resume")

    async def label(self) -> str:
        if self._has_labels:
            return str((await self.server.get("/weight_info", within_s=CHECK_WITHIN_S))["weight_version"])
        found = START_TIME.search(await self.server.text("/metrics", within_s=CHECK_WITHIN_S))
        return f"started {found.group(1)}" if found else ""

    async def check(self) -> None:
        await self.server.get("/health", within_s=CHECK_WITHIN_S)

    async def close(self) -> None:
        await self.server.close()


class _LogProb(msgspec.Struct):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


def _is_on_cpu(config: Mapping[str, Any]) -> bool:
    return "cpu" in str(config.get("device_config"))
