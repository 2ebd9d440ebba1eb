"""An engine around a scripted server: what becomes of requests that are answered, break off, or are aborted.

What becomes of them when weights change is in `test_served_loads.py`, when the server is given up in
`test_served_watch.py`; all in modelled time.
"""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import ScriptedServer
from served_scenes import AWAY, assert_is_true, begin, play, request, version

from benchmarks.common.clock import now_s
from offbeat.engines.dialect import Chunk
from offbeat.engines.http_calls import ServerRefused
from offbeat.engines.protocol import EngineDied, EngineError, Finish, KvMode
from offbeat.engines.server_engine import ABORT_WITHIN_S, ABORTED_PAUSE_S, CHECK_EVERY_S, MAX_BREAKS, ServerEngine

# Requests


def test_a_server_is_asked_what_it_is_and_serves_nothing_before_a_load():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        assert (engine.version, engine.capabilities.num_slots, engine.capabilities.max_context_tokens) == (None, 8, 512)
        assert engine.capabilities.fingerprint == "scripted 1.0 float32"
        with pytest.raises(EngineError, match="engine w, request a: no version is loaded yet"):
            await engine.generate(request("a"))
        await asyncio.sleep(10 * CHECK_EVERY_S)
        assert server.num_checks == 0, "whatever it serves is nothing to us"
        await engine.load(version(1))

    play(scenario, loads=None)


def test_what_streams_in_becomes_a_segment_of_the_version_that_is_loaded():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 3)
        server.end("a", Finish.LENGTH)
        generation = await answer
        (segment,) = generation.segments
        assert (generation.id, generation.finish, segment.worker) == ("a", Finish.LENGTH, "w")
        assert (len(segment.tokens), segment.engine) == (3, "scripted 1.0 float32")
        assert_is_true(generation)

    play(scenario)


def test_a_request_that_runs_already_or_cannot_be_done_is_refused_and_never_sent():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        with pytest.raises(EngineError, match="engine w: a request with id a is already running"):
            await engine.generate(request("a"))
        with pytest.raises(EngineError, match="engine w, request b: kv = stale"):
            await engine.generate(request("b", KvMode.STALE))
        server.end("a")
        await answer
        assert len(server.calls) == 1

    play(scenario, has_spans=False)


def test_an_abort_that_nobody_asked_for_is_tried_again_after_a_pause_and_is_no_failed_task():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        aborted_s, num_checks = now_s(), server.num_checks
        server.end("a", Finish.ABORT)
        await server.until_again("a", 2)
        assert server.sent_s[1] == aborted_s + ABORTED_PAUSE_S
        assert server.num_checks > num_checks, "it is asked how it is before it is sent anything"
        await server.sample("a", 2)
        server.end("a")
        assert (await answer).finish is Finish.STOP

    play(scenario)


def test_an_abort_that_nobody_asked_for_with_tokens_is_carried_on_at_once():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        for num_tries in range(1, MAX_BREAKS + 2):
            await server.sample("a", 2)
            server.end("a", Finish.ABORT)
            await server.until_again("a", num_tries + 1)
        assert now_s() == 0
        server.end("a")
        generation = await answer
        assert sum(len(segment.tokens) for segment in generation.segments) == 2 * (MAX_BREAKS + 1)
        assert_is_true(generation)

    play(scenario)


@pytest.mark.parametrize("how", ["aborts", "breaks off", "ends without a reason", "refuses"])
def test_a_server_that_is_well_and_never_answers_fails_the_request_after_some_tries_and_goes_on_with_others(how):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        answer, other = await begin(engine, server, "a", "b")
        for num_tries in range(1, MAX_BREAKS + 1):
            await server.until_again("a", num_tries)
            if how == "aborts":
                server.end("a", Finish.ABORT)
            else:
                errors = {"breaks off": AWAY, "refuses": ServerRefused("500: no", 500)}
                server.drop("a", errors.get(how))
        said = {"aborts": "the server aborted the call", "breaks off": "the line is down", "refuses": "500: no"}
        with pytest.raises(
            EngineError, match=f"^engine w, request a: .*{said.get(how, 'ended without a finish reason')}"
        ) as e:
            await answer
        assert not isinstance(e.value, EngineDied)
        assert len(server.calls_of("a")) == MAX_BREAKS
        server.end("b")
        assert (await other).finish is Finish.STOP

    play(scenario)


def test_tokens_that_came_before_a_line_broke_are_kept_and_the_rest_is_asked_for():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        for num_tries in range(1, MAX_BREAKS):
            await server.sample("a", 2)
            server.drop("a", AWAY)
            await server.until_again("a", num_tries + 1)
        server.end("a")
        assert_is_true(await answer)
        first, second, third = server.calls
        assert [len(call.tokens) - len(first.tokens) for call in (second, third)] == [2, 4]
        assert len({call.id for call in server.calls}) == len({call.seed for call in server.calls}) == 3

    play(scenario)


def test_what_came_before_a_line_broke_is_sampled_anew_where_weights_changed_meanwhile():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        await engine.load(version(2))
        await server.sample("a", 2)
        server.drop("a", AWAY)
        await server.until_again("a", 2)
        assert server.calls[1].tokens == server.calls[0].tokens
        await server.sample("a", 3)
        server.end("a")
        generation = await answer
        assert [(s.version, len(s.tokens)) for s in generation.segments] == [(2, 3)]
        assert_is_true(generation)

    play(scenario)


def test_what_a_server_says_no_to_is_not_asked_again():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        server.fail("send", ServerRefused("400: no such token", 400))
        with pytest.raises(EngineError, match="engine w, request a: 400: no such token"):
            await engine.generate(request("a"))
        assert len(server.calls) == 1
        assert engine.health.may_generate

    play(scenario)


def test_an_answer_that_is_none_fails_its_request_alone_and_frees_the_server_of_it():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        answer, other = await begin(engine, server, "a", "b")
        await server.say("a", Chunk([1, 2], [-1.0]))
        with pytest.raises(EngineError, match="2 tokens but 1 log-probs"):
            await answer
        assert server.inside.keys() == {"b"}
        server.end("b")
        assert (await other).finish is Finish.STOP

    play(scenario)


def test_a_request_that_nobody_waits_for_any_more_leaves_the_server_and_its_id_is_free():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        answer.cancel()
        await server.until(lambda: not server.inside)
        (again,) = await begin(engine, server, "a")
        server.end("a")
        assert (await again).finish is Finish.STOP

    play(scenario)


# Aborts


def test_an_abort_ends_those_who_are_named_with_what_they_have_and_returns_once_they_are_gone():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        answer, other = await begin(engine, server, "a", "b")
        await server.sample("a", 2)
        await engine.abort(["a", "nobody"])
        generation = answer.result() if answer.done() else await answer
        assert (generation.finish, len(generation.segments[0].tokens)) == (Finish.ABORT, 2)
        assert engine._running.keys() == {"b"}
        await engine.abort()
        assert ((await other).finish, (await other).segments) == (Finish.ABORT, ())
        assert server.told[-2:] == ["abort a", "abort b"]
        assert (len(server.calls), now_s()) == (2, 0), "neither is tried again"

    play(scenario)


def test_an_abort_that_overtakes_its_own_call_is_repeated_until_it_has_arrived():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        arrives = server.hold("send")
        answer = asyncio.create_task(engine.generate(request("a")))
        await server.until(lambda: server.calls)
        aborting = asyncio.create_task(engine.abort())
        await server.until(lambda: server.told.count("abort a") == 3)
        assert not aborting.done()
        arrives.set()
        await aborting
        assert (await answer).finish is Finish.ABORT
        assert server.told.count("abort a") > 3
        assert len(server.calls) == 1

    play(scenario)


def test_an_abort_ends_what_waits_for_a_load_without_sending_it():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        loads = server.hold("load")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "load 2" in server.told)
        answer = asyncio.create_task(engine.generate(request("a")))
        await asyncio.sleep(1)
        await engine.abort()
        assert engine._running == {}
        assert ((await answer).finish, (await answer).segments) == (Finish.ABORT, ())
        loads.set()
        await loading
        assert server.calls == []

    play(scenario)


def test_what_is_aborted_and_ends_by_itself_meanwhile_says_so():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.end("a", Finish.LENGTH)
        await engine.abort()
        assert (await answer).finish is Finish.LENGTH

    play(scenario)


def test_an_abort_does_not_wait_for_another_request_that_took_the_same_id():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        async def twice() -> None:
            for _ in range(2):
                await engine.generate(request("a"))

        asking = asyncio.create_task(twice())
        await server.until_inside("a")
        await engine.abort()
        assert not asking.done()
        await server.until_again("a", 2)
        server.end("a")
        await asking

    play(scenario)


def test_an_abort_does_not_wait_for_a_request_that_nobody_waits_for_any_more():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.ends_aborted = False
        aborting = asyncio.create_task(engine.abort())
        await server.until(lambda: "abort a" in server.told)
        answer.cancel()
        await aborting

    play(scenario)


@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_server_that_cannot_be_rid_of_a_request_is_dead(is_deaf):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.ends_aborted = False
        if not is_deaf:
            server.fail("abort", AWAY)
        told = f"1 requests did not end within {ABORT_WITHIN_S:g} s of being aborted" if is_deaf else "the line is down"
        with pytest.raises(EngineDied, match=rf"engine w \(scripted 1.0\): {told}"):
            await engine.abort()
        with pytest.raises(EngineDied, match=told):
            await answer
        assert server.inside == {}

    play(scenario)
