"""What the vLLM dialect refuses, and the answers of releases that cannot be run here. The exchanges are in the shapes
that vLLM 0.26 and 0.32 were seen to use; what a real server does with the same calls is in `tests/contracts`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from recorded_server import playing

from offbeat.engines.dialect import Call, Chunk
from offbeat.engines.http_calls import Server, ServerRefused
from offbeat.engines.protocol import EngineError, Finish, KvMode
from offbeat.engines.vllm.api import EXTENSION, GENERATE, VllmDialect
from offbeat.engines.vllm.weights import FromPath
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version

Result = TypeVar("Result")
CALL = Call("call", [5, 6], 7, Sampling(max_new_tokens=8), "salt")


def play(exchanges: list[dict[str, Any]], scenario: Callable[[VllmDialect], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        async with playing(exchanges) as url:
            dialect = VllmDialect(Server(url))
            try:
                return await asyncio.wait_for(scenario(dialect), timeout=30)
            finally:
                await dialect.close()

    return asyncio.run(run())


def server(*more: dict[str, Any], version: str = "0.26.0", paused: bool = False, **told: Any) -> list[dict[str, Any]]:
    """How a server is probed, up to where releases differ."""
    model = {"dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs", "hf_config": told.pop("hf_config", "")}
    config = {"model_config": model | told.pop("model", {}), "parallel_config": {}, "device_config": {}, **told}
    return [
        {"asked": "GET /version", "json": {"version": version}},
        {"asked": "GET /v1/models", "json": {"data": [{"id": "offbeat", "max_model_len": 2048}]}},
        {"asked": "GET /is_paused", "json": {"is_paused": paused}},
        *([{"asked": "POST /resume", "json": {"status": "resumed"}}] if paused else []),
        {"asked": "GET /server_info?config_format=json", "json": {"vllm_config": config}},
        *more,
    ]


UNLABELLED = {"asked": "GET /weight_info", "status": 404, "json": {"detail": "Not Found"}}
LABELLED = {"asked": "GET /weight_info", "json": {"weight_version": "default"}}
ON_CPU = {"device_config": {"device_type": "cpu"}, "hf_config": 'LlamaConfig {\n  "tie_word_embeddings": true\n}'}

SPLITTING = {"device_config": {"device": "cpu"}, "scheduler_config": {"enable_chunked_prefill": True}}


def probe(dialect: VllmDialect) -> Any:
    return dialect.probe()


def test_a_server_that_can_neither_name_its_weights_nor_tell_where_they_changed():
    facts = play(server(UNLABELLED), probe)
    assert (facts.has_labels, facts.has_spans, facts.max_context_tokens) == (False, False, 2048)
    assert facts.kv_modes == {KvMode.SAME, KvMode.REFILL}
    assert facts.fingerprint == "vllm 0.26.0 bfloat16"


@pytest.mark.parametrize("spans", [None, [{"version": "default", "start": 0, "end": 1}]])
def test_one_that_names_its_weights_is_asked_for_a_token_to_see_whether_it_tells_spans(spans):
    token = {"asked": f"POST {GENERATE}", "json": {"choices": [{"token_ids": [3], "weight_versions": spans}]}}
    facts = play(server(LABELLED, token, version="0.32.0"), probe)
    assert (facts.has_labels, facts.has_spans) == (True, spans is not None)
    assert (KvMode.STALE in facts.kv_modes) is (spans is not None)


def test_one_that_someone_left_paused_is_woken():
    assert play(server(UNLABELLED, paused=True), probe).name == "vllm 0.26.0"


def test_a_server_with_a_gpu_may_split_prompts_and_one_without_may_take_them_whole():
    for told in (SPLITTING | {"device_config": {"device": "cuda"}}, SPLITTING | {"scheduler_config": {}}):
        assert play(server(UNLABELLED, **told), probe).name == "vllm 0.26.0"


@pytest.mark.parametrize(
    ("exchanges", "told"),
    [
        (
            [*server()[:2], {"asked": "GET /is_paused", "status": 404, "json": {"detail": "Not Found"}}],
            "start it with VLLM_SERVER_DEV_MODE=1",
        ),
        (server(model={"logprobs_mode": "raw_logprobs"}), "raw_logprobs.*--logprobs-mode processed_logprobs"),
        (
            server(LABELLED, {"asked": f"POST {GENERATE}", "status": 403, "json": {"error": {"message": "no"}}}),
            "start it with --enable-scale-out",
        ),
        (server(**ON_CPU), "vLLM on a CPU would keep the old output layer.*leave out engine.url"),
        (server(**SPLITTING), "on a CPU crashes when it splits the prompt.*start it with --no-enable-chunked-prefill"),
        ([{"asked": "GET /version", "json": {"release": "1"}}], "not like vLLM"),
        ([{"asked": "GET /version", "json": ["0.26"]}], "not like vLLM"),
    ],
)
def test_a_server_that_cannot_be_worked_with_is_refused_with_its_remedy(exchanges, told):
    with pytest.raises(EngineError, match=rf"http://127.0.0.1:\d+.*{told}"):
        play(exchanges, probe)


def test_a_tied_output_layer_on_a_cpu_is_packed_again_where_the_server_has_our_mends(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "model.safetensors").write_bytes(b"weights")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": "<linked>"}}
    exchanges = server(UNLABELLED, parallel_config={"worker_extension_cls": EXTENSION}, **ON_CPU)
    exchanges.append({"asked": "POST /collective_rpc", "body": reload, "json": {"results": [None]}})
    packed = {"method": "offbeat_pack_head", "kwargs": {}}
    exchanges.append({"asked": "POST /collective_rpc", "body": packed, "json": {"results": [True]}})

    async def scenario(dialect: VllmDialect) -> None:
        await dialect.probe()
        version = Version(7, step=7, parent=None, digest="d", path=tmp_path / "7")
        await dialect.stage(version)
        await dialect.load(version, "7-a")

    play(exchanges, scenario)


def generate(*events: Any) -> list[Chunk]:
    async def scenario(dialect: VllmDialect) -> list[Chunk]:
        return [chunk async for chunk in dialect.generate(CALL)]

    return play([{"asked": f"POST {GENERATE}", "events": list(events)}], scenario)


def event(*tokens: int, finish: str | None = None, logprob: float = -0.5, **more: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token in tokens]
    return {"choices": [{"token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": finish, **more}]}


def test_tokens_come_as_they_are_sampled_and_the_last_says_why_it_was():
    first, last = generate(event(1, 2), event(3, finish="stop"), "[DONE]")
    assert (list(first.tokens), list(first.logprobs), first.finish) == ([1, 2], [-0.5, -0.5], None)
    assert (list(last.tokens), last.finish) == ([3], Finish.STOP)


def test_an_older_server_that_aborts_without_a_token_says_nothing_of_it():
    first, last = generate(event(1), "[DONE]")
    assert (first.finish, last.finish, list(last.tokens)) == (None, Finish.ABORT, [])


def test_an_answer_that_simply_ends_has_no_last_chunk():
    assert [chunk.finish for chunk in generate(event(1))] == [None]


@pytest.mark.parametrize(
    ("events", "error", "told"),
    [
        ([event(1, logprob=-9999.0)], EngineError, "no log-prob for a sampled token"),
        ([event(1, finish="repetition")], EngineError, "unknown finish reason 'repetition'"),
        ([{"error": {"message": "the engine is dead"}}], ServerRefused, "the engine is dead"),
        (['{"choices": [{"token_ids": "x"}]}'], EngineError, "token_ids"),
        (["{nonsense"], EngineError, "nonsense"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_names_the_server(events, error, told):
    with pytest.raises(error, match=rf"http://127.0.0.1:\d+{GENERATE}.*{told}"):
        generate(*events)


def test_an_abort_names_the_call_as_the_server_does():
    body = {"request_ids": ["generate-tokens-a", "generate-tokens-b"]}
    play(
        [{"asked": "POST /abort_requests", "body": body, "text": ""}],
        lambda dialect: dialect.abort(["a", "b"]),
    )


def test_a_version_that_is_deleted_after_it_was_staged_is_read_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("7").mkdir()
    Path("7/model.safetensors").write_bytes(b"weights")
    version, read = Version(7, step=7, parent=None, digest="d", path=Path("7")), []

    async def call(method: str, /, **arguments: str) -> None:
        folder = Path(arguments["weights_path"])
        read.append((method, folder.is_absolute(), (folder / "model.safetensors").read_bytes()))

    async def scenario() -> None:
        transfer = FromPath()
        await transfer.stage(version)
        shutil.rmtree("7")
        await transfer.load(call, version)

    asyncio.run(scenario())
    assert read == [("reload_weights", True, b"weights")]
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_is_gone_before_it_is_staged_is_refused_and_leaves_nothing(tmp_path):
    version = Version(7, step=7, parent=None, digest="d", path=tmp_path / "7")
    with pytest.raises(EngineError, match=r"version 7: its files cannot be read from .*No such file"):
        asyncio.run(FromPath().stage(version))
    assert list(tmp_path.iterdir()) == []
