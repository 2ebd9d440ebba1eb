"""What holds for engines that are servers of their own, shown on the real ones."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from engine_servers import DIALECTS, dialect_of, server_at
from test_engine_contract import ask, generate, prompt, with_engine

from offbeat.engines.protocol import Engine, EngineDied, Finish, Generation, KvMode
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.direct import Channel, DirectDialect

pytestmark = pytest.mark.timeout(900)  # the first test of a server starts it, which takes minutes on busy cores
HITS = re.compile(r"^vllm:prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)


@pytest.fixture
def engine_name(request, served):
    """Only for servers; the others have nothing of this."""
    name = request.node.callspec.params["served"]
    if name not in DIALECTS:
        pytest.skip("no server")
    return name


@pytest.fixture
def url(request, engine_name):
    """Where the server listens; asked for last, because asking starts it."""
    return request.getfixturevalue(f"{engine_name.split()[0]}_url")


async def num_hits(engine: Engine, url: str) -> float:
    """Cached tokens that vLLM used so far, by its own count."""
    if isinstance(engine, ServerEngine) and isinstance(engine.dialect, DirectDialect):
        assert engine.metrics.num_resumed_tokens is not None
        return engine.metrics.num_resumed_tokens
    server = server_at(url)
    try:
        found = HITS.search(await server.text("/metrics"))
        assert found is not None
        return float(found.group(1))
    finally:
        await server.close()


@pytest.mark.parametrize(("kv", "is_hit"), [(KvMode.SAME, True), (KvMode.REFILL, False)])
def test_the_servers_own_counter_tells_whether_a_prefix_was_computed_again(engine_name, served, url, kv, is_hit):
    async def scenario(engine: Engine) -> float:
        first = ask(prompt(20, 200), seed=1, max_new_tokens=64)
        answer = await engine.generate(first)
        tokens = np.concatenate([first.tokens, *(segment.tokens for segment in answer.segments)])
        before = await num_hits(engine, url)
        rest = ask(tokens, seed=1, position=64, max_new_tokens=8)
        await engine.generate(replace(rest, kv=kv))
        return await num_hits(engine, url) - before

    assert (with_engine(served, scenario) >= 200) is is_hit


def test_no_prefix_of_older_weights_is_hit_after_a_load(engine_name, served, url):
    async def scenario(engine: Engine) -> float:
        await engine.generate(ask(prompt(21, 200)))
        await engine.load(served.versions[1])
        before = await num_hits(engine, url)
        await engine.generate(ask(prompt(21, 200)))
        return await num_hits(engine, url) - before

    assert with_engine(served, scenario) == 0


def test_weights_that_someone_else_changed_end_the_engine_and_are_named(engine_name, served, url):
    async def scenario(engine: ServerEngine) -> None:
        if not engine.facts.has_labels:
            pytest.skip("it could not be told")
        running = asyncio.create_task(engine.generate(ask(prompt(22), max_new_tokens=1500)))
        await asyncio.sleep(0.3)
        await rename_weights(engine_name, url, "theirs")
        with pytest.raises(EngineDied, match=r"vllm .*\btheirs\b"):
            await running
        with pytest.raises(EngineDied, match="theirs"):
            await engine.generate(ask(prompt(22)))

    with_engine(served, scenario)


async def rename_weights(engine_name: str, url: str, label: str) -> None:
    if engine_name == "direct":
        channel = Channel(url)
        await channel.ask("rename", label=label)
        await channel.close()
    else:
        server = server_at(url)
        await server.post("/update_weight_version", {"new_version": label})
        await server.close()


def test_a_worker_that_died_in_a_load_leaves_a_server_that_the_next_one_can_use(engine_name, served, url):
    async def scenario(engine: Engine) -> None:
        await dialect_of(engine_name, url).pause(keeps_kv=False)

    with_engine(served, scenario)
    (answer,) = generate(served, ask(prompt(23)))
    assert answer.finish is Finish.LENGTH


def test_a_request_that_nobody_waits_for_any_more_leaves_the_server(engine_name, served, url):
    async def scenario(engine: Engine) -> Generation:
        doomed = [asyncio.create_task(engine.generate(ask(prompt(i), max_new_tokens=1800))) for i in range(16)]
        await asyncio.sleep(0.3)
        for task in doomed:
            task.cancel()
        await asyncio.wait(doomed)
        return await engine.generate(ask(prompt(24)))

    assert with_engine(served, scenario).finish is Finish.LENGTH
