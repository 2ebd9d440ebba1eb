"""The SGLang dialect against recorded exchanges: each file in `recorded/sglang` says where it comes from. What a real
server does with the same calls is for `tests/contracts`, where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from recorded_server import playing, recording

from offbeat.engines.dialect import Call, Chunk, Facts, Span
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.protocol import EngineError, Finish, KvMode, Request
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.sglang import api
from offbeat.engines.sglang.api import SglangDialect
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version

Result = TypeVar("Result")
Exchanges = list[dict[str, Any]]
CALL = Call("call", [5, 6, 7], 1234, Sampling(max_new_tokens=8, temperature=0.7), "salt")
TOKENS = [21, 22, 23, 24, 25, 26, 27, 28]
LOGPROBS = [-0.11, -1.31, -0.72, -2.05, -0.4, -0.9, -0.05, -1.6]
VERSION = Version(7, step=7, parent=None, digest="d", path=Path("/weights/7"))


def recorded(name: str) -> Exchanges:
    exchanges: Exchanges = deepcopy(recording(f"sglang/{name}")["exchanges"])
    return exchanges


def play(exchanges: Exchanges, scenario: Callable[[SglangDialect], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with playing(exchanges) as url:
            dialect = SglangDialect(Server(url))
            try:
                return await asyncio.wait_for(scenario(dialect), timeout=30)
            finally:
                await dialect.close()

    return asyncio.run(run())


def probed(**changed: Any) -> tuple[Exchanges, dict[str, Any]]:
    """The exchanges of a probe, of a server that is started otherwise."""
    exchanges = recorded("probe")
    exchanges[0]["json"] |= changed
    return exchanges, exchanges[0]["json"]


def probe(exchanges: Exchanges) -> Facts:
    return play(exchanges, lambda dialect: dialect.probe())


def generate(exchanges: Exchanges, call: Call = CALL, **started_with: Any) -> list[Chunk]:
    async def scenario(dialect: SglangDialect) -> list[Chunk]:
        await dialect.probe()
        return [chunk async for chunk in dialect.generate(call)]

    return play([*probed(**started_with)[0], *exchanges], scenario)


def whole(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [t for chunk in chunks for t in chunk.tokens], [p for chunk in chunks for p in chunk.logprobs]


def test_a_server_tells_what_it_can_do():
    facts = probe(recorded("probe"))
    assert facts == Facts(
        name="sglang 0.5.23",
        dtype="bfloat16",
        max_context_tokens=4090,
        has_spans=True,
        has_labels=True,
        kv_modes=frozenset(KvMode),
    )
    assert facts.fingerprint == "sglang 0.5.23 bfloat16"


def test_quantised_weights_and_kv_are_in_the_fingerprint():
    facts = probe(probed(quantization="fp8", kv_cache_dtype="fp8_e4m3")[0])
    assert facts.fingerprint == "sglang 0.5.23 bfloat16 fp8 kv-fp8_e4m3"


@pytest.mark.parametrize("started_with", [{"disable_overlap_schedule": False}, {"pp_size": 2}])
def test_kv_is_not_kept_where_a_pause_falls_into_a_step(started_with):
    assert probe(probed(**started_with)[0]).kv_modes == {KvMode.SAME, KvMode.REFILL}


def test_a_release_without_spans_is_used_without():
    exchanges = recorded("probe")
    for exchange in exchanges[2:]:
        del exchange["json"]["meta_info"]["weight_versions"]
    facts = probe(exchanges)
    assert (facts.has_spans, facts.kv_modes) == (False, {KvMode.SAME, KvMode.REFILL})


@pytest.mark.parametrize(
    ("started_with", "remedy"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 1"),
        ({"disaggregation_mode": "decode"}, "without --disaggregation-mode"),
    ],
)
def test_a_server_that_cannot_be_worked_with_is_refused_with_a_remedy(started_with, remedy):
    with pytest.raises(EngineError, match=remedy):
        probe(probed(**started_with)[0][:1])


def test_another_kind_of_server_is_refused():
    with pytest.raises(EngineError, match="not the answer of an SGLang server"):
        probe([{"asked": "GET /server_info", "json": {"vllm_config": {}}}])


def test_a_server_that_gives_no_logprobs_is_refused():
    exchanges = recorded("probe")
    exchanges[2]["json"]["meta_info"]["output_top_logprobs"] = []
    with pytest.raises(EngineError, match="output_top_logprobs"):
        probe(exchanges[:3])


def before_temperature() -> Exchanges:
    exchanges = recorded("probe")
    exchanges[3]["json"] = exchanges[2]["json"]
    return exchanges


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_before_temperature_will_do_where_there_is_none(temperature):
    exchange = recorded("generate")[0]
    exchange["body"]["sampling_params"]["temperature"] = temperature
    call = replace(CALL, sampling=Sampling(max_new_tokens=8, temperature=temperature))

    async def scenario(dialect: SglangDialect) -> list[Chunk]:
        await dialect.probe()
        return [chunk async for chunk in dialect.generate(call)]

    assert whole(play([*before_temperature(), exchange], scenario)) == (TOKENS, LOGPROBS)


def test_logprobs_before_temperature_are_refused_under_one():
    async def scenario(dialect: SglangDialect) -> None:
        await dialect.probe()
        async for _ in dialect.generate(CALL):
            pass

    with pytest.raises(EngineError, match=r"temperature = 0\.7.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        play(before_temperature(), scenario)


def test_an_answer_comes_in_parts_and_tells_which_weights_it_is_of():
    chunks = generate(recorded("generate"))
    assert [len(chunk.tokens) for chunk in chunks] == [1, 3, 4]
    assert whole(chunks) == (TOKENS, LOGPROBS)
    assert [chunk.finish for chunk in chunks] == [None, None, Finish.LENGTH]
    assert chunks[-1].spans == (Span("a", 0, 5), Span("b", 5, 8))


def test_an_answer_that_repeats_itself_is_taken_once():
    chunks = generate(recorded("generate_repeating"), incremental_streaming_output=False)
    assert [len(chunk.tokens) for chunk in chunks] == [1, 5, 2]
    assert whole(chunks) == (TOKENS, LOGPROBS)
    assert chunks[-1].spans == (Span("a", 0, 5), Span("b", 5, 8))


def test_sampling_is_asked_for_in_the_servers_words():
    exchange = recorded("generate")[0]
    sampling = Sampling(max_new_tokens=8, temperature=0.0, top_p=0.9, top_k=40, min_p=0.1, stop_token_ids=(2, 28))
    exchange["body"]["sampling_params"] |= {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "stop_token_ids": [2, 28],
        "ignore_eos": False,
    }
    generate([exchange], replace(CALL, sampling=sampling))


@pytest.mark.parametrize("case", recording("sglang/finish_reasons")["reasons"])
def test_every_reason_to_end_is_told_apart(case):
    told = recording("sglang/finish_reasons")["reasons"][case]
    exchange = recorded("generate")[0]
    del exchange["body"]
    exchange["events"][-2]["meta_info"]["finish_reason"] = told["reason"]
    sampling = Sampling(
        max_new_tokens=told.get("max_new_tokens", 100), stop_token_ids=tuple(told.get("stop_token_ids", ()))
    )
    call = replace(CALL, sampling=sampling)
    if "error" in told:
        with pytest.raises(EngineError, match=told["error"]):
            generate([exchange], call)
    else:
        chunks = generate([exchange], call)
        assert chunks[-1].finish is Finish(told["finish"])
        assert whole(chunks) == (TOKENS, LOGPROBS)


@pytest.mark.parametrize(("index", "num_tokens"), [(0, 5), (1, 4), (2, 4)])
def test_an_aborted_call_has_each_of_its_tokens_once(index, num_tokens):
    chunks = generate([recorded("aborted")[index]])
    assert whole(chunks) == (TOKENS[:num_tokens], LOGPROBS[:num_tokens])
    assert chunks[-1].finish is Finish.ABORT
    assert chunks[-1].spans == (Span("a", 0, num_tokens),)


def test_events_that_leave_tokens_out_are_refused():
    exchange = recorded("generate")[0]
    del exchange["events"][1]
    with pytest.raises(EngineError, match="the answer grew from 1 to 8 tokens, but the event has 4 log-probs"):
        generate([exchange])


@pytest.mark.parametrize("event", ["{", "[]", '{"meta_info": 3}', "null"])
def test_an_event_that_is_none_of_the_servers_is_refused(event):
    exchange = recorded("generate")[0] | {"events": [event]}
    with pytest.raises(EngineError, match="/generate"):
        generate([exchange])


def test_a_token_without_a_logprob_is_refused():
    exchange = recorded("generate")[0]
    exchange["events"][1]["meta_info"]["output_token_logprobs"][1][0] = None
    with pytest.raises(EngineError, match="no log-prob"):
        generate([exchange])


@pytest.mark.parametrize(("index", "why"), [(0, "unknown field"), (1, "input too long")])
def test_a_refused_call_says_why(index, why):
    with pytest.raises(ServerRefused, match=why) as caught:
        generate([recorded("refused")[index]])
    assert caught.value.status == 400


def test_an_answer_that_breaks_off_has_no_end():
    exchange = recorded("generate")[0]
    del exchange["events"][2:]
    assert [chunk.finish for chunk in generate([exchange])] == [None, None]


def test_an_abort_names_one_request_and_no_other():
    play(recorded("abort"), lambda dialect: dialect.abort(["r1"]))
    names = ["r1", "r10", "r1-1", "1", "", "2:r1", "r" * 12]
    rids = [api._rid(name) for name in names]
    assert not any(a is not b and b.startswith(a) for a in rids for b in rids)


async def load(dialect: SglangDialect, *, keeps_kv: bool) -> str:
    await dialect.pause(keeps_kv=keeps_kv)
    await dialect.load(VERSION, "b")
    label = await dialect.label()
    await dialect.resume()
    return label


def test_a_load_forgets_all_kv_first_however_often_that_is_refused():
    assert play(recorded("load"), lambda dialect: load(dialect, keeps_kv=False)) == "b"


def test_a_load_may_keep_kv_once_the_server_stands_still():
    assert play(recorded("load_keeping_kv"), lambda dialect: load(dialect, keeps_kv=True)) == "b"


def test_kv_that_cannot_be_forgotten_ends_the_pause_with_the_servers_word(monkeypatch):
    monkeypatch.setattr(api, "FLUSH_WITHIN_S", 0.0)
    with pytest.raises(ServerRefused, match="Flush cache failed"):
        play(recorded("load")[:2], lambda dialect: dialect.pause(keeps_kv=False))


def test_a_failed_load_says_why():
    with pytest.raises(ServerRefused, match="size mismatch"):
        play(recorded("load_failed"), lambda dialect: dialect.load(VERSION, "b"))


def test_a_load_is_believed_only_where_the_server_says_that_it_was_one():
    exchange = recorded("load_failed")[0] | {"status": 200}
    with pytest.raises(EngineError, match="size mismatch"):
        play([exchange], lambda dialect: dialect.load(VERSION, "b"))


def test_a_server_that_does_not_name_its_weights_is_refused():
    with pytest.raises(EngineError, match="no weight_version"):
        play([{"asked": "GET /model_info", "json": {"model_path": "m"}}], lambda dialect: dialect.label())


def test_a_server_is_asked_for_a_token_to_see_whether_it_is_well():
    async def scenario(dialect: SglangDialect) -> None:
        await dialect.check()
        with pytest.raises(ServerRefused, match="503"):
            await dialect.check()

    play(recorded("well"), scenario)


def test_an_engine_loads_a_version_and_generates_from_it():
    async def scenario(dialect: SglangDialect) -> None:
        engine = await ServerEngine.attach(dialect, worker="w", num_slots=4)
        try:
            await engine.load(VERSION)
            request = Request("r", np.array([5, 6, 7]), seed=3, sampling=CALL.sampling)
            generation = await engine.generate(request)
        finally:
            await engine.close()
        (segment,) = generation.segments
        assert (generation.finish, segment.version, segment.kv_version) == (Finish.LENGTH, 7, 7)
        assert (segment.tokens.tolist(), segment.engine) == (TOKENS, "sglang 0.5.23 bfloat16")
        np.testing.assert_allclose(segment.logprobs, LOGPROBS, rtol=1e-6)

    play(recorded("first_load_and_request"), scenario)
