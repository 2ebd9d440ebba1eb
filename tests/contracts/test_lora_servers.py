"""Adapters on a real vLLM, in a worker's own process and behind HTTP, against transformers and peft: what each version
says, what becomes of requests and prefixes when the next one comes, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from engine_servers import NUM_SLOTS, SERVERS, own_server
from served_engine import forward_logprobs, tiny_llama
from test_engine_contract import DELAYS_S, LONG, again, ask, prompt, tokens_of
from test_real_servers import num_hits
from transformers import PreTrainedModel

from offbeat.config.schema import Config
from offbeat.engines.http_calls import Server
from offbeat.engines.process.lifecycle import ServerEngines
from offbeat.engines.protocol import EngineDied, EngineError, Finish, Generation, KvMode, Request, Version
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.direct import Channel, DirectLoraDialect
from offbeat.engines.vllm.lora import OURS, LoraDialect
from offbeat.errors import UserError

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.timeout(900),  # a busy machine takes minutes to start a server
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM has no adapters in float32 on a GPU"),
]
PYTHON = os.environ.get(SERVERS["vllm"][1])
RANK = 4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 2e-2
FAR = 0.1
"""How far two versions are apart at least, on average over tokens."""
ENOUGH = 8
"""Tokens of which that average is taken: two versions may agree on one token, and on a second."""
Result = TypeVar("Result")


class UnlabelledDialect(LoraDialect):
    """A newer server driven as vLLM 0.26, whose weights cannot be named."""

    async def _can_label(self) -> bool:
        return False


@dataclass(frozen=True)
class Adapters:
    """A vLLM with LoRA, and versions that it may be told to load: the first changes nothing."""

    url: str
    base: Path
    versions: tuple[Version, ...]
    models: tuple[PreTrainedModel, ...]
    dialect: type[LoraDialect | DirectLoraDialect] = LoraDialect

    def logprobs(self, version: int, request: Request, response: np.ndarray) -> np.ndarray:
        return forward_logprobs(self.models[version], request, response)

    async def attach(self, folder: Path) -> ServerEngine:
        if self.dialect is DirectLoraDialect:
            dialect = DirectLoraDialect(Channel(self.url), folder)
        else:
            dialect = self.dialect(Server(self.url), rank=RANK, model=str(self.base), base=self.base, folder=folder)
        return await ServerEngine.attach(dialect, worker="w", num_slots=NUM_SLOTS)


def make_adapter(folder: Path, *, seed: int, is_zero: bool = False, rank: int = RANK) -> PreTrainedModel:
    """Beside a model of always the same weights."""
    base = tiny_llama(seed=1)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "lora_B" in name and not is_zero:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model.eval()


def adapters_on(name: str, tmp_path: Path) -> Iterator[Adapters]:
    if not PYTHON:
        pytest.skip("make test-engines has a vLLM")
    tiny_llama(seed=1).save_pretrained(tmp_path / "base")
    models = tuple(make_adapter(tmp_path / str(n), seed=n, is_zero=n == 0) for n in range(3))
    versions = tuple(Version(n, step=n, parent=None, digest=str(n), path=tmp_path / str(n)) for n in range(3))
    with own_server(name, PYTHON, tmp_path / "base", tmp_path / "engine.log", lora_rank=RANK) as (url, _):
        yield Adapters(url, tmp_path / "base", versions, models)


@pytest.fixture(scope="module")
def served_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    yield from adapters_on("vllm", tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def direct_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    yield from adapters_on("direct", tmp_path_factory.mktemp("lora"))


BEHIND_HTTP = pytest.mark.parametrize(
    "adapters", [LoraDialect, UnlabelledDialect], ids=["labels", "no labels"], indirect=True
)


@pytest.fixture(params=[LoraDialect, UnlabelledDialect, DirectLoraDialect], ids=["labels", "no labels", "direct"])
def adapters(request):
    name = "direct_adapters" if request.param is DirectLoraDialect else "served_adapters"
    return replace(request.getfixturevalue(name), dialect=request.param)


@pytest.fixture
def with_adapters(adapters, tmp_path):
    """Runs what it is given with an engine that serves the first version."""

    def run(scenario: Callable[[ServerEngine], Awaitable[Result]]) -> Result:
        async def attached() -> Result:
            engine = await adapters.attach(tmp_path / "adapters")
            try:
                await engine.load(adapters.versions[0])
                return await asyncio.wait_for(scenario(engine), timeout=120)
            finally:
                await engine.close()

        return asyncio.run(attached())

    return run


def assert_from(adapters: Adapters, version: int, request: Request, answer: Generation) -> None:
    """That one version, and no other, gave the whole answer."""
    (segment,) = answer.segments
    assert (segment.version, segment.kv_version) == (version, version)
    for number in range(len(adapters.models)):
        gap = np.abs(segment.logprobs - adapters.logprobs(number, request, segment.tokens))
        assert gap.max() < TOLERANCE if number == version else gap.mean() > FAR, (number, gap.mean())


def test_every_version_answers_as_peft_does_and_no_other(adapters, with_adapters):
    async def scenario(engine: ServerEngine) -> None:
        for number in (0, 1, 2, 1, 0):
            await engine.load(adapters.versions[number])
            requests = [ask(prompt(i, 1 + 9 * i), seed=i, temperature=t) for i, t in ((1, 1.0), (2, 1.0), (3, 0.6))]
            for request, answer in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
                assert_from(adapters, number, request, answer)

    with_adapters(scenario)


def test_an_adapter_that_changes_nothing_answers_as_the_model_below_it(adapters, with_adapters):
    base, requests = tiny_llama(seed=1), [ask(prompt(i, 3 + i), temperature=0.0) for i in range(4)]

    async def scenario(engine: ServerEngine) -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, requests))

    for request, answer in zip(requests, with_adapters(scenario), strict=True):
        with torch.no_grad():
            tokens = torch.tensor(request.tokens).unsqueeze(0)
            expected = base.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert tokens_of(answer).tolist() == expected[0, len(request.tokens) :].tolist()
        np.testing.assert_allclose(
            answer.segments[0].logprobs, forward_logprobs(base, request, tokens_of(answer)), atol=TOLERANCE
        )


def test_a_load_in_flight_splits_every_generation_where_the_adapter_changed(adapters, with_adapters):
    requests = [ask(prompt(30 + i, 5 + 3 * i), seed=i, max_new_tokens=LONG) for i in range(4)]

    async def scenario(engine: ServerEngine) -> list[Generation]:
        for delay_s in DELAYS_S:
            await engine.load(adapters.versions[0])
            tasks = [asyncio.create_task(engine.generate(again(request))) for request in requests]
            for version in adapters.versions[1:]:
                await asyncio.sleep(delay_s)
                await engine.load(version)
            await asyncio.sleep(delay_s)
            await engine.abort()
            answers = await asyncio.gather(*tasks)
            if all([len(s.tokens) >= ENOUGH for s in answer.segments] == [True] * 3 for answer in answers):
                return answers
        raise AssertionError("no load came halfway")

    for request, answer in zip(requests, with_adapters(scenario), strict=True):
        assert [(s.version, s.kv_version) for s in answer.segments] == [(0, 0), (1, 1), (2, 2)]
        assert [s.start for s in answer.segments] == [0, *(s.end for s in answer.segments[:-1])]
        response = tokens_of(answer)
        truths = [adapters.logprobs(number, request, response) for number in range(3)]
        for segment in answer.segments:
            for number, truth in enumerate(truths):
                gap = np.abs(segment.logprobs - truth[segment.start : segment.end])
                is_right = gap.max() < TOLERANCE if number == segment.version else gap.mean() > FAR
                assert is_right, f"{segment.start}..{segment.end} of version {segment.version} under {number}: {gap}"


def test_a_prefix_is_shared_within_a_version_and_never_across_a_load(adapters, with_adapters):
    async def scenario(engine: ServerEngine) -> tuple[float, list[float]]:
        async def hits_of(request: Request, version: int) -> float:
            before = await num_hits(engine, adapters.url)
            assert_from(adapters, version, request, await engine.generate(request))
            return await num_hits(engine, adapters.url) - before

        await engine.generate(ask(prompt(40, 200)))
        within, across = await hits_of(ask(prompt(40, 200), seed=2), 0), []
        for number in (1, 2, 0, 0):  # a number that comes again was loaded again
            await engine.load(adapters.versions[number])
            across.append(await hits_of(ask(prompt(40, 200)), number))
        return within, across

    within, across = with_adapters(scenario)
    assert within >= 100
    assert across == [0, 0, 0, 0]


async def names_at(url: str) -> list[str]:
    server = Server(url)
    try:
        return [model["id"] for model in (await server.get("/v1/models"))["data"]]
    finally:
        await server.close()


@BEHIND_HTTP
def test_one_adapter_replaces_the_other_and_the_last_leaves_with_its_worker(adapters, with_adapters, tmp_path):
    async def scenario(engine: ServerEngine) -> None:
        for version in (*adapters.versions, *adapters.versions):
            await engine.load(version)
            _, *ours = await names_at(adapters.url)
            assert len(ours) == len(list((tmp_path / "adapters").iterdir())) == 1
            assert ours[0].startswith(f"{OURS}{version.number}-")

    with_adapters(scenario)
    assert len(asyncio.run(names_at(adapters.url))) == 1
    assert not (tmp_path / "adapters").exists()


@BEHIND_HTTP
def test_what_a_killed_worker_left_is_cleared_away_by_the_next(adapters, with_adapters, tmp_path):
    async def killed() -> list[str]:
        engine = await adapters.attach(tmp_path / "adapters")
        await engine.load(adapters.versions[1])
        engine._watch.cancel()
        await engine.dialect.server.close()
        return await names_at(adapters.url)

    assert len(asyncio.run(killed())) == 2
    (left,) = (tmp_path / "adapters").iterdir()
    request = ask(prompt(41))

    async def scenario(engine: ServerEngine) -> Generation:
        assert len(await names_at(adapters.url)) == 2
        assert not left.exists()
        return await engine.generate(request)

    assert_from(adapters, 0, request, with_adapters(scenario))


def test_a_version_that_is_deleted_while_it_is_served_goes_on_answering(adapters, with_adapters, tmp_path):
    path = shutil.copytree(adapters.versions[1].path, tmp_path / "version")
    doomed, request = replace(adapters.versions[1], path=path), ask(prompt(42, 30))

    async def scenario(engine: ServerEngine) -> Generation:
        await engine.load(doomed)
        shutil.rmtree(path)
        return await engine.generate(request)

    assert_from(adapters, 1, request, with_adapters(scenario))


def test_an_adapter_that_the_server_refuses_leaves_the_one_before_it(adapters, with_adapters, tmp_path):
    make_adapter(tmp_path / "large", seed=5, rank=32)
    large = Version(3, step=3, parent=2, digest="3", path=tmp_path / "large")
    empty = Version(4, step=4, parent=3, digest="4", path=tmp_path)
    running, request = ask(prompt(43), max_new_tokens=400), ask(prompt(44))

    async def scenario(engine: ServerEngine) -> tuple[Generation, Generation]:
        task = asyncio.create_task(engine.generate(running))
        with pytest.raises(EngineError, match=r"rank 32"):
            await engine.load(large)
        with pytest.raises(
            EngineError, match=r"version 4: its adapter cannot be read from .*adapter_config.json: No such"
        ):
            await engine.load(empty)
        assert engine.version == 0
        assert len(list((tmp_path / "adapters").iterdir())) == 1
        return await task, await engine.generate(request)

    first, second = with_adapters(scenario)
    assert_from(adapters, 0, running, first)
    assert_from(adapters, 0, request, second)


@BEHIND_HTTP
def test_an_adapter_that_someone_else_took_away_ends_the_engine_and_is_named(adapters, with_adapters):
    async def scenario(engine: ServerEngine) -> None:
        other, (_, ours) = Server(adapters.url), await names_at(adapters.url)
        await other.send("/v1/unload_lora_adapter", {"lora_name": ours})
        await other.close()
        with pytest.raises(EngineDied, match=rf"lost its loaded adapter.*{ours}"):
            await engine.generate(ask(prompt(45)))
        with pytest.raises(EngineDied, match=ours):
            await engine.load(adapters.versions[1])

    with_adapters(scenario)


def test_keys_and_values_can_be_computed_anew_and_cannot_be_kept(adapters, with_adapters):
    anew, kept = replace(ask(prompt(46, 40)), kv=KvMode.REFILL), replace(ask(prompt(46)), kv=KvMode.STALE, kv_lag=1)

    async def scenario(engine: ServerEngine) -> Generation:
        with pytest.raises(EngineError, match=r"kv = stale: .* supports "):
            await engine.generate(kept)
        return await engine.generate(anew)

    assert_from(adapters, 0, anew, with_adapters(scenario))


def test_a_partial_is_carried_on_under_the_next_adapter(adapters, with_adapters):
    first = ask(prompt(47), seed=4, max_new_tokens=20)

    async def scenario(engine: ServerEngine) -> tuple[Request, Generation]:
        prefix = tokens_of(await engine.generate(first))
        await engine.load(adapters.versions[1])
        rest = ask(np.concatenate([first.tokens, prefix]), seed=4, position=20, max_new_tokens=20)
        return rest, await engine.generate(rest)

    rest, answer = with_adapters(scenario)
    assert answer.segments[0].start == 20
    assert_from(adapters, 1, rest, answer)


# As a worker attaches


def attached(served: Adapters, folder: Path, *, url: str | None = None, **model: object) -> ServerEngines:
    told = {"path": str(served.base), "dtype": "float32", "lora_rank": RANK} | model
    config = Config.model_validate(
        {
            "model": told,
            "rollout": {"engine": "vllm", "slots": NUM_SLOTS, "max_prompt_tokens": 256, "max_new_tokens": 256},
            "engine": {"url": url or served.url},
        }
    )
    return ServerEngines(config, "w", folder)


def test_a_worker_of_a_run_with_adapters_attaches_to_a_server_that_has_them(served_adapters, tmp_path):
    request = ask(prompt(50), max_new_tokens=16)

    async def scenario() -> Generation:
        engine = await attached(served_adapters, tmp_path).open()
        try:
            await engine.load(served_adapters.versions[2])
            return await engine.generate(request)
        finally:
            await engine.close()

    answer = asyncio.run(scenario())
    assert answer.finish is Finish.LENGTH
    assert_from(served_adapters, 2, request, answer)


def test_a_server_that_cannot_take_the_runs_adapters_is_refused_with_its_remedy(served_adapters, tmp_path):
    tiny_llama(seed=2).save_pretrained(tmp_path / "other")
    refused = [
        ({"lora_rank": 16}, r"up to rank 8, but model.lora_rank = 16; .*--max-lora-rank 16\b"),
        (
            {"path": str(tmp_path / "other")},
            rf"serves {served_adapters.base}, .*start it with the model {tmp_path / 'other'}",
        ),
    ]
    for model, told in refused:
        with pytest.raises(UserError, match=rf"{served_adapters.url}: .*{told}"):
            asyncio.run(attached(served_adapters, tmp_path, **model).open())


def test_a_server_without_adapters_is_refused_with_its_remedy(served_adapters, tmp_path, request):
    url = request.getfixturevalue("vllm_url")
    told = "--enable-lora --max-lora-rank 8 --max-cpu-loras 2 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    with pytest.raises(UserError, match=rf"{re.escape(url)}: this vLLM has no LoRA; start it with {told}"):
        asyncio.run(attached(served_adapters, tmp_path, url=url).open())
