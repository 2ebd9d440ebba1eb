"""SGLang's HTTP API as a `Dialect`, for release 0.5.23 and for older releases, which report no spans (which weights
sampled which tokens).

Log-probs are over the whole vocabulary, even with top-p, top-k or min-p. Several options of the server matter:

- `--enable-deterministic-inference`: without it, seeds have no effect.
- `--incremental-streaming-output`: without it, each event repeats the whole answer so far.
- `--skip-tokenizer-init`: turns off the conversion between text and tokens, which Offbeat does not need.
- `--disable-overlap-schedule`, for `KvMode.STALE`: without it, a pause leaves one token of each request sampled but not
  yet counted. After a load that token would be attributed to the new weights.
- `SGLANG_RETURN_ORIGINAL_LOGPROB` must not be set in the environment: with it, log-probs are those before temperature.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offbeat.engines.dialect import STREAM_TOKENS, Call, Chunk, Facts, Span, read_event
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version

LAUNCHER = "offbeat_in_sglang"
INSIDE_FOLDER = Path(__file__).parent / "inside"
"""Folder of the module `LAUNCHER`, with which a worker starts a server of its own."""
GENERATE = "/generate"
REPEATED_STREAM_TOKENS = 512
"""Tokens per streamed event if each event repeats the whole answer so far."""
LOAD_WITHIN_S = 600.0
CHECK_WITHIN_S = 10.0
HEALTH_WITHIN_S = 25.0
"""Deadline of a health check; the server itself waits 20 s for a token before it reports a failure."""
INFO_WITHIN_S = 120.0
FLUSH_WITHIN_S = 10.0
FLUSH_AGAIN_S = 0.1
COOL = 0.5
"""Temperature of the second of two test calls; that of the first is 1. If the server's log-probs are those after
temperature, the log-probs of two tokens differ twice as much at 0.5 as at 1."""
NUM_COMPARED = 8
MIN_SPREAD = 1e-2
"""Spread (largest minus smallest) below which log-probs differ only by rounding, so that comparing them at two
temperatures shows nothing."""


class SglangDialect:
    """Implements `offbeat.engines.dialect.Dialect` for an SGLang server."""

    def __init__(self, server: Server):
        self.server = server
        self._is_incremental = False
        self._is_tempered = True
        """Whether log-probs are those after temperature."""

    async def probe(self) -> Facts:
        info = await self.server.get("/server_info", within_s=INFO_WITHIN_S)
        self._refuse_what_cannot_be_worked_with(info)
        await self.resume()  # an earlier worker may have left it paused
        self._is_incremental = bool(info.get("incremental_streaming_output"))
        warm, cool = await self._sample_at(1.0), await self._sample_at(COOL)
        self._is_tempered = warm.spread < MIN_SPREAD or cool.spread > warm.spread * (1 + 1 / COOL) / 2
        has_spans = bool(warm.weight_versions)
        pauses_between_steps = bool(info.get("disable_overlap_schedule")) and info.get("pp_size", 1) == 1
        modes = {KvMode.SAME, KvMode.REFILL} | ({KvMode.STALE} if has_spans and pauses_between_steps else set())
        kv_dtype = info.get("kv_cache_dtype") or "auto"
        quantisation = (info.get("quantization"), kv_dtype != "auto" and f"kv-{kv_dtype}")
        return Facts(
            name=f"sglang {info['version']}",
            dtype=str(info.get("dtype", "")),
            # Excludes the tokens that the server reserves; it would silently cut a longer answer.
            max_context_tokens=int(info["max_req_input_len"]),
            has_spans=has_spans,
            has_labels=True,
            kv_modes=frozenset(modes),
            is_seeded=bool(info.get("enable_deterministic_inference")),
            quantisation=" ".join(word for word in quantisation if word),
            is_tempered=self._is_tempered,
        )

    def _refuse_what_cannot_be_worked_with(self, info: Any) -> None:
        if not isinstance(info, dict) or not {"version", "max_req_input_len"} <= info.keys():
            raise EngineError(f"{self.server.url}/server_info: not the answer of an SGLang server; check engine.url")
        if (num := info.get("tokenizer_worker_num", 1)) != 1:
            raise EngineError(
                f"{self.server.url}: tokenizer_worker_num = {num}, and each of these processes has its own label for "
                "the weights; start SGLang with --tokenizer-worker-num 1"
            )
        if (mode := info.get("disaggregation_mode") or "null") != "null":
            raise EngineError(
                f"{self.server.url}: disaggregation_mode = {mode}; start SGLang without --disaggregation-mode, so that "
                "one server holds all KV of a request"
            )

    async def _sample_at(self, temperature: float) -> _Sample:
        body = {
            "input_ids": [0],
            "return_logprob": True,
            "top_logprobs_num": NUM_COMPARED,
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        }
        answer = await self.server.post(GENERATE, body, within_s=INFO_WITHIN_S)
        try:
            return msgspec.convert(answer, _Sampled).meta_info
        except msgspec.ValidationError as error:
            raise EngineError(
                f"{self.server.url}{GENERATE}: not the answer of an SGLang server: {error}: {str(answer)[:300]}"
            ) from error

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        body = self._body(call)
        num_tokens = 0
        last: Chunk | None = None
        async with aclosing(self.server.events(GENERATE, body)) as events:  # type: ignore[type-var]
            async for event in events:  # to the end of the stream, so that its connection can be reused
                if event == b"[DONE]" or last is not None:
                    continue
                chunk = self._read(event, call.sampling, num_tokens)
                num_tokens += len(chunk.tokens)
                if chunk.finish is None:
                    yield chunk
                else:
                    last = chunk
        if last is not None:
            yield last

    def _body(self, call: Call) -> Mapping[str, Any]:
        sampling = call.sampling
        if not self._is_tempered and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"{self.server.url}: the server's log-probs are those before temperature, so temperature = "
                f"{sampling.temperature:g} cannot be used; start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB in its "
                "environment"
            )
        return {
            "rid": _rid(call.id),
            "input_ids": call.tokens,
            "stream": True,
            "return_logprob": True,
            "extra_key": call.salt,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "sampling_seed": call.seed,
                "stop_token_ids": sampling.stop_token_ids,
                # Must be off if there are stop tokens: the server would ignore these too.
                "ignore_eos": not sampling.stop_token_ids,
                "stream_interval": STREAM_TOKENS if self._is_incremental else REPEATED_STREAM_TOKENS,
            },
        }

    def _read(self, event: bytes, sampling: Sampling, num_before: int) -> Chunk:
        answer = read_event(self.server, GENERATE, _EVENT, event)
        if answer.error is not None:
            raise ServerRefused(f"{self.server.url}{GENERATE}: server error: {answer.error.message}", answer.error.code)
        meta, sampled = answer.meta_info, answer.meta_info.output_token_logprobs
        if self._is_incremental:
            # The last event after an abort may repeat earlier tokens; new ones come last.
            num_new = meta.completion_tokens - num_before
            if not 0 <= num_new <= len(sampled):
                raise EngineError(
                    f"{self.server.url}{GENERATE}: an event says that the answer grew from {num_before} to "
                    f"{meta.completion_tokens} tokens, but the event has {len(sampled)} log-probs"
                )
            sampled = sampled[len(sampled) - num_new :]
        else:
            sampled = sampled[num_before:]
        logprobs = [logprob for logprob, _, _ in sampled if logprob is not None]
        if len(logprobs) != len(sampled):
            raise EngineError(f"{self.server.url}{GENERATE}: the server sent no log-prob for a sampled token")
        finish = self._finish(meta.finish_reason, sampling, num_before + len(sampled))
        spans = tuple(span for span in meta.weight_versions or () if span.end > span.start)
        tokens = [token for _, token, _ in sampled]
        return Chunk(tokens, logprobs, finish, spans if finish is not None else (), meta.cached_tokens)

    def _finish(self, reason: _FinishReason | None, sampling: Sampling, num_tokens: int) -> Finish | None:
        if reason is None:
            return None
        if reason.type == "abort" and reason.status_code is None:
            return Finish.ABORT
        if reason.type == "abort":
            raise ServerRefused(
                f"{self.server.url}{GENERATE}: the server aborted the answer: {reason.message}",
                reason.status_code or 500,
            )
        if reason.type == "stop" and reason.matched in sampling.stop_token_ids:
            return Finish.STOP
        if reason.type == "length" or (reason.type == "stop" and isinstance(reason.matched, int)):
            # Short of max_new_tokens, a limit of the server or an end token of the model does not end the request.
            return Finish.LENGTH if num_tokens >= sampling.max_new_tokens else Finish.ABORT
        # A token outside the vocabulary, caused by NaN, is reported as a stop too.
        raise EngineError(
            f"{self.server.url}{GENERATE}: the answer ended for an unknown reason: {reason.type} {reason.matched!r}"
        )

    async def abort(self, ids: Sequence[str]) -> None:
        await asyncio.gather(*(self.server.post("/abort_request", {"rid": _rid(name)}) for name in ids))

    async def pause(self, *, keeps_kv: bool) -> None:
        await self.server.post("/pause_generation", {"mode": "in_place" if keeps_kv else "retract"})
        # The server answers before it has paused; only the answer to a later call shows that it has.
        if keeps_kv:
            await self.server.get("/server_info", within_s=LOAD_WITHIN_S)
        else:
            await self._flush()

    async def _flush(self) -> None:
        """Makes the server drop all keys and values, because a pause keeps those of prefixes that requests share. The
        flush option of the load call is not used, because older servers exit if that flush fails."""
        deadline_s = time.monotonic() + FLUSH_WITHIN_S
        while True:
            try:
                await self.server.text("/flush_cache", within_s=LOAD_WITHIN_S)
                return
            except ServerRefused as error:
                if error.status != 400 or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(FLUSH_AGAIN_S)

    async def stage(self, version: Version) -> None:
        return None

    async def load(self, version: Version, label: str) -> None:
        """Loads a version from its files. After a failure the server may have a mixture of old and new weights, under
        the old label."""
        body = {
            "model_path": str(version.path),
            "load_format": "auto",
            "weight_version": label,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        answer = await self.server.post("/update_weights_from_disk", body, within_s=LOAD_WITHIN_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self.server.url}/update_weights_from_disk: the load failed: {str(answer)[:300]}")

    async def resume(self) -> None:
        await self.server.post("/continue_generation", {"torch_empty_cache": False})

    async def label(self) -> str:
        info = await self.server.get("/model_info", within_s=CHECK_WITHIN_S)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineError(f"{self.server.url}/model_info: the answer has no weight_version; use a newer SGLang")
        return str(info["weight_version"])

    async def check(self) -> None:
        await self.server.get("/health_generate", within_s=HEALTH_WITHIN_S)

    async def close(self) -> None:
        await self.server.close()


def _rid(name: str) -> str:
    """Returns the id to send to the server for a call. None of these ids is a prefix of another, because an abort in
    SGLang ends all calls whose ids begin with the id in the abort."""
    return f"{len(name)}:{name}"


class _FinishReason(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    completion_tokens: int = 0
    """Number of tokens in the whole answer so far."""
    cached_tokens: int | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[Span] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Event(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


class _Sample(msgspec.Struct):
    """Answer to a test call, which samples one token: the log-probs of the likeliest tokens in its place, and the spans
    (which weights sampled which tokens). The spans are None if the server reports none."""

    output_top_logprobs: Annotated[list[list[tuple[float | None, int, str | None]]], msgspec.Meta(min_length=1)]
    weight_versions: list[Span] | None = None

    @property
    def spread(self) -> float:
        first = [logprob for logprob, _, _ in self.output_top_logprobs[0] if logprob is not None]
        return max(first, default=0.0) - min(first, default=0.0)


class _Sampled(msgspec.Struct):
    meta_info: _Sample


_EVENT = msgspec.json.Decoder(_Event)
