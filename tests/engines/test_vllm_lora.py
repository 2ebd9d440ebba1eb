"""What the vLLM dialect for adapters refuses, and how it speaks. The exchanges are in the shapes that vLLM 0.32 was
seen to use, which 0.26 has too by its source; what a real server does with the same calls is in `tests/contracts`."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from recorded_server import playing
from test_vllm import LABELLED, UNLABELLED, event, server

from offbeat.engines.dialect import Call, Chunk, Facts
from offbeat.engines.http_calls import Server
from offbeat.engines.protocol import EngineDied, EngineError, KvMode
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.api import GENERATE
from offbeat.engines.vllm.lora import ALLOW, LOAD, OURS, RANKS, UNLOAD, LoraDialect, server_rank
from offbeat.trajectory import Sampling
from offbeat.weights.version import ADAPTER_CONFIG, ADAPTER_FILE, Version

Result = TypeVar("Result")
FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
LORA = {"max_lora_rank": 16, "max_loras": 1, "max_cpu_loras": 2, "lora_dtype": "torch.bfloat16", "target_modules": None}
NAMELESS = {
    "asked": f"POST {LOAD}",
    "body": {"lora_name": "", "lora_path": ""},
    "status": 400,
    "json": {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided.", "code": 400}},
}
LOADED = {"asked": f"POST {LOAD}", "text": "Success: LoRA adapter added successfully."}
UNLOADED = {"asked": f"POST {UNLOAD}", "text": "Success: LoRA adapter removed successfully."}


def models(*names: str) -> dict[str, Any]:
    return {"asked": "GET /v1/models", "json": {"data": [{"id": "offbeat"}, *({"id": name} for name in names)]}}


def with_lora(*more: dict[str, Any], **lora: Any) -> list[dict[str, Any]]:
    """How a server with adapters is probed, up to where releases differ."""
    return server(*more, lora_config=LORA | lora, device_config={"device": "cuda"})


READY = [*with_lora(NAMELESS, UNLABELLED), models()]


def play(exchanges: list[dict[str, Any]], scenario: Callable[[LoraDialect], Awaitable[Result]], folder: Path) -> Result:
    async def run() -> Result:
        async with playing(exchanges) as url:
            dialect = LoraDialect(Server(url), rank=12, model="Org/Model", base=folder, folder=folder / "adapters")
            try:
                return await asyncio.wait_for(scenario(dialect), timeout=30)
            finally:
                await dialect.close()

    return asyncio.run(run())


def rooted(exchanges: list[dict[str, Any]], root: object) -> list[dict[str, Any]]:
    """The same, of a server that was started with some folder or model."""
    _, told, *more = exchanges
    (model,) = told["json"]["data"]
    return [exchanges[0], told | {"json": {"data": [model | {"root": str(root)}]}}, *more]


def probe(dialect: LoraDialect) -> Awaitable[Facts]:
    return dialect.probe()


def adapter_in(folder: Path, number: int) -> Version:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(f"{name} of {number}")
    return Version(number, step=number, parent=None, digest=str(number), path=folder)


def call_for(label: str) -> Call:
    return Call("call", [5, 6], 7, Sampling(max_new_tokens=8), "salt", label)


@pytest.mark.parametrize(("rank", "largest"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512), (513, None)])
def test_a_server_is_started_for_the_next_rank_that_there_is(rank, largest):
    assert server_rank(rank) == largest
    assert list(RANKS) == sorted(RANKS)


@pytest.mark.parametrize("root", ["Org/Model", "<base>", "<link>"])
def test_requests_leave_for_a_load_even_where_the_server_could_tell_spans(tmp_path, root):
    (tmp_path / "link").symlink_to(tmp_path)
    root = {"<base>": tmp_path, "<link>": tmp_path / "link"}.get(root, root)
    spans = [{"version": "default", "start": 0, "end": 1}]
    token = {"asked": f"POST {GENERATE}", "json": {"choices": [{"token_ids": [3], "weight_versions": spans}]}}
    facts = play(rooted([*with_lora(NAMELESS, LABELLED, token), models()], root), probe, tmp_path)
    assert (facts.has_labels, facts.has_spans) == (True, False)
    assert facts.kv_modes == {KvMode.SAME, KvMode.REFILL}


UNKNOWN = {"asked": f"POST {LOAD}", "status": 404, "json": {"detail": "Not Found"}}


@pytest.mark.parametrize(
    ("exchanges", "root", "told"),
    [
        (server(lora_config=None), "Org/Model", f"--enable-lora --max-lora-rank 16 --max-cpu-loras 2 and {ALLOW}=1"),
        (with_lora(max_lora_rank=8), "Org/Model", "up to rank 8, but model.lora_rank = 12; .*--max-lora-rank 16"),
        (with_lora(target_modules=["q_proj"]), "Org/Model", "q_proj.*start it without --lora-target-modules"),
        (with_lora(lora_dtype="torch.float32"), "Org/Model", "cannot run adapters in float32.*--dtype bfloat16"),
        (with_lora(), "Org/Other", "serves Org/Other, but the adapters' base is model.path = 'Org/Model'"),
        (with_lora(), "/", "serves /, but the adapters' base is model.path"),
        (with_lora(UNKNOWN), "Org/Model", f"loads no adapters while it runs; start it with {ALLOW}=1"),
    ],
)
def test_a_server_that_cannot_take_adapters_is_refused_with_its_remedy(tmp_path, exchanges, root, told):
    with pytest.raises(EngineError, match=rf"http://127.0.0.1:\d+: .*{told}"):
        play(rooted(exchanges, root), probe, tmp_path)


def test_a_tied_output_layer_on_a_cpu_is_no_matter_where_no_weights_are_loaded(tmp_path):
    config = {"device_config": {"device": "cpu"}, "hf_config": '"tie_word_embeddings": true'}
    exchanges = [*server(NAMELESS, UNLABELLED, lora_config=LORA | {"lora_dtype": "torch.float32"}, **config), models()]
    assert play(rooted(exchanges, tmp_path), probe, tmp_path).name == "vllm 0.26.0"


def test_what_an_earlier_worker_left_is_cleared_away_and_what_others_loaded_is_not(tmp_path):
    (tmp_path / "adapters" / "old").mkdir(parents=True)
    left = f"{OURS}7-abc"
    exchanges = [*READY[:-1], models("theirs", left), UNLOADED | {"body": {"lora_name": left}}]
    play(rooted(exchanges, tmp_path), probe, tmp_path)
    assert not (tmp_path / "adapters").exists()


def test_a_call_names_the_adapter_that_was_loaded_last_and_the_one_before_is_gone(tmp_path):
    first, second = adapter_in(tmp_path / "7", 7), adapter_in(tmp_path / "8", 8)
    seen: list[list[str]] = []
    sent = {"request_id": "call", "token_ids": [5, 6], "stream": True, "cache_salt": "salt", "sampling_params": "<any>"}
    exchanges = [
        *rooted(READY, tmp_path),
        LOADED | {"body": {"lora_name": "<first>", "lora_path": "<folder 1>"}},
        {"asked": f"POST {GENERATE}", "body": sent | {"model": "<first>"}, "events": [event(1, finish="stop")]},
        LOADED | {"body": {"lora_name": "<second>", "lora_path": "<folder 2>"}},
        UNLOADED | {"body": {"lora_name": "<first>"}},
        {"asked": f"POST {GENERATE}", "body": sent | {"model": "<second>"}, "events": [event(2, finish="stop")]},
        UNLOADED | {"body": {"lora_name": "<second>"}},  # as it is closed
    ]

    async def scenario(dialect: LoraDialect) -> list[Chunk]:
        chunks = []
        await dialect.probe()
        for version, label in ((first, "7-a"), (second, "8-b")):
            await dialect.stage(version)
            shutil.rmtree(version.path)  # its files are kept by names of our own
            await dialect.load(version, label)
            seen.extend(
                sorted(path.read_text() for path in folder.iterdir()) for folder in dialect.adapters.folder.iterdir()
            )
            chunks += [chunk async for chunk in dialect.generate(call_for(label))]
        return chunks

    chunks = play(exchanges, scenario, tmp_path)
    assert [list(chunk.tokens) for chunk in chunks] == [[1], [2]]
    assert seen == [[f"{name} of {number}" for name in FILES] for number in (7, 8)]
    assert not (tmp_path / "adapters").exists()


def test_a_call_of_other_weights_than_those_that_are_served_is_not_sent(tmp_path):
    version = adapter_in(tmp_path / "7", 7)

    async def scenario(dialect: LoraDialect) -> None:
        await dialect.probe()
        await dialect.stage(version)
        await dialect.load(version, "7-a")
        with pytest.raises(AssertionError, match=r"a call for .* was sent while .* is served"):
            await anext(dialect.generate(call_for("6-z")))

    play([*rooted(READY, tmp_path), LOADED, UNLOADED], scenario, tmp_path)


def test_an_adapter_that_the_server_does_not_know_any_more_means_that_it_is_another_server(tmp_path):
    version = adapter_in(tmp_path / "7", 7)
    gone = {"error": {"message": "The model `x` does not exist.", "code": 404}}
    exchanges = [
        *rooted(READY, tmp_path),
        LOADED,
        {"asked": f"POST {GENERATE}", "status": 404, "json": gone},
        UNLOADED | {"status": 404, "json": gone},
    ]

    async def scenario(dialect: LoraDialect) -> None:
        await dialect.probe()
        await dialect.stage(version)
        await dialect.load(version, "7-a")
        with pytest.raises(EngineDied, match=r"the server has lost its loaded adapter: .*does not exist"):
            await anext(dialect.generate(call_for("7-a")))

    play(exchanges, scenario, tmp_path)


def test_an_adapter_that_is_refused_or_not_there_leaves_no_files(tmp_path):
    version = adapter_in(tmp_path / "7", 7)
    bare = Version(8, step=8, parent=7, digest="8", path=tmp_path)
    refused = {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16.", "code": 500}}

    async def scenario(dialect: LoraDialect) -> None:
        await dialect.probe()
        with pytest.raises(EngineError, match=r"rank 64 is greater than max_lora_rank 16"):
            await dialect.stage(version)
        with pytest.raises(
            EngineError, match=r"version 8: its adapter cannot be read from .*adapter_config.json: No such"
        ):
            await dialect.stage(bare)
        assert list(dialect.adapters.folder.iterdir()) == []

    play([*rooted(READY, tmp_path), LOADED | {"status": 500, "json": refused}], scenario, tmp_path)


def test_a_server_that_is_gone_when_an_adapter_comes_is_dead(tmp_path):
    version = adapter_in(tmp_path / "7", 7)

    async def scenario() -> None:
        async with playing(rooted(READY, tmp_path)) as url:
            dialect = LoraDialect(Server(url), rank=12, model="m", base=tmp_path, folder=tmp_path / "adapters")
            engine = await ServerEngine.attach(dialect, worker="w", num_slots=4)
        with pytest.raises(EngineDied, match=rf"engine w .*{url}{LOAD}"):
            await engine.load(version)
        with pytest.raises(EngineDied, match=url):
            await engine.load(version)
        await engine.close()

    asyncio.run(scenario())


def test_one_that_was_staged_and_never_loaded_makes_room_for_the_next(tmp_path):
    first, second = adapter_in(tmp_path / "7", 7), adapter_in(tmp_path / "8", 8)
    exchanges = [
        *rooted(READY, tmp_path),
        LOADED | {"body": {"lora_name": "<first>", "lora_path": "<folder 1>"}},
        UNLOADED | {"body": {"lora_name": "<first>"}},
        LOADED | {"body": {"lora_name": "<second>", "lora_path": "<folder 2>"}},
        UNLOADED | {"body": {"lora_name": "<second>"}},
    ]

    async def scenario(dialect: LoraDialect) -> None:
        await dialect.probe()
        for version in (first, second):
            await dialect.stage(version)
            (folder,) = dialect.adapters.folder.iterdir()
            assert folder.name.startswith(f"{OURS}{version.number}-")

    play(exchanges, scenario, tmp_path)


def test_files_are_copied_where_they_cannot_be_linked(tmp_path, monkeypatch):
    version = adapter_in(tmp_path / "7", 7)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)

    async def scenario(dialect: LoraDialect) -> list[str]:
        await dialect.probe()
        await dialect.stage(version)
        (folder,) = dialect.adapters.folder.iterdir()
        return sorted(file.read_text() for file in folder.iterdir())

    assert play([*rooted(READY, tmp_path), LOADED, UNLOADED], scenario, tmp_path) == [f"{name} of 7" for name in FILES]
