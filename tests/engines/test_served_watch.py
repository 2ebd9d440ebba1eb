"""An engine around a scripted server: when the server is doubted, given up, and never asked again."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import ScriptedServer
from served_scenes import AWAY, assert_is_true, begin, play, request, version

from benchmarks.common.clock import now_s
from offbeat.engines.http_calls import ServerAway
from offbeat.engines.protocol import EngineDied, Finish
from offbeat.engines.server_engine import (
    ABORTED_PAUSE_S,
    CHECK_AGAIN_S,
    CHECK_EVERY_S,
    DEAD_AFTER_S,
    MAX_BREAKS,
    STUCK_AFTER_S,
    ServerEngine,
)

NOBODY = ServerAway("nobody listens", is_refused=True)


def test_a_server_that_does_not_answer_for_a_while_is_sent_nothing_and_used_again_when_it_does():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        server.trouble = AWAY
        server.drop("a", AWAY)
        await server.until(lambda: "a" not in server.inside)
        late = asyncio.create_task(engine.generate(request("b")))
        await asyncio.sleep(DEAD_AFTER_S - 1)
        assert len(server.calls) == 1
        server.trouble = None
        await server.until_inside("a", "b")
        for name in "ab":
            await server.sample(name)
            server.end(name)
        for generation in (await answer, await late):
            assert generation.finish is Finish.STOP
            assert_is_true(generation)
        num_checks = server.num_checks
        await asyncio.sleep(10 * CHECK_EVERY_S)
        assert server.num_checks <= num_checks + 11, "there is no doubt any more"

    play(scenario)


def test_a_server_that_does_not_answer_for_long_is_dead_and_all_who_wait_are_told_which_it_was():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        inside, broken = await begin(engine, server, "a", "b")
        server.trouble = AWAY
        server.drop("b", AWAY)
        await server.until(lambda: "b" not in server.inside)
        waiting = asyncio.create_task(engine.generate(request("c")))
        for answer in (inside, broken, waiting):
            with pytest.raises(EngineDied, match=r"^engine w \(scripted 1.0\): it is dead: the line is down"):
                await answer
        assert DEAD_AFTER_S <= now_s() <= DEAD_AFTER_S + 2 * CHECK_AGAIN_S
        assert server.num_checks <= DEAD_AFTER_S / CHECK_AGAIN_S + 2
        assert server.inside == {}
        server.trouble = None
        for call in (engine.generate(request("d")), engine.abort(), engine.load(version(2))):
            with pytest.raises(EngineDied, match="it is dead"):
                await call
        assert server.told == ["send a", "send b"]

    play(scenario)


def test_a_server_where_nobody_listens_is_dead_at_once_though_somebody_may_listen_a_moment_later():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.drop("a", NOBODY)
        with pytest.raises(EngineDied, match="it was dead and is back, with weights of unknown age"):
            await answer
        assert now_s() == 0

    play(scenario)


def test_an_abort_that_nobody_asked_for_by_a_server_that_ends_is_the_servers_death():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.end("a", Finish.ABORT)
        await asyncio.sleep(ABORTED_PAUSE_S / 2)
        server.trouble = NOBODY
        with pytest.raises(EngineDied, match="nobody listens"):
            await answer
        assert len(server.calls) == 1

    play(scenario)


def test_the_last_line_that_a_request_may_lose_to_a_server_that_dies_is_the_servers_death():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        for num_tries in range(1, MAX_BREAKS + 1):
            await server.until_again("a", num_tries)
            server.trouble = NOBODY if num_tries == MAX_BREAKS else None
            server.drop("a", AWAY)
        with pytest.raises(EngineDied, match="nobody listens"):
            await answer

    play(scenario)


def test_an_idle_server_that_is_gone_is_found_out_by_looking():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        await asyncio.sleep(10 * CHECK_EVERY_S + 1)
        assert 9 <= server.num_checks <= 11
        server.trouble = NOBODY
        await asyncio.sleep(CHECK_EVERY_S)
        with pytest.raises(EngineDied, match="nobody listens"):
            await engine.generate(request("a"))

    play(scenario)


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_server_that_others_started_again_or_gave_other_weights_is_dead(has_labels):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.name = "theirs"
        with pytest.raises(EngineDied, match=r"its weights are not those loaded last: .*'theirs'"):
            await answer
        assert now_s() <= CHECK_EVERY_S

    play(scenario, has_spans=False, has_labels=has_labels)


def test_a_label_that_was_asked_for_before_a_load_and_comes_after_it_says_nothing():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        arrives = server.hold("label")
        num_labels = server.num_labels
        await server.until(lambda: server.num_labels > num_labels)
        await engine.load(version(2))
        arrives.set()
        await asyncio.sleep(2 * CHECK_EVERY_S)
        (answer,) = await begin(engine, server, "a")
        server.end("a")
        assert (await answer).finish is Finish.STOP

    play(scenario)


def test_a_label_that_comes_in_the_middle_of_a_load_says_nothing():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        checked, named = server.hold("check"), server.hold("label")
        await server.until(lambda: server.num_checks)
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: server.number == 2)
        checked.set()  # whoever looks now hears of a label that this engine has not made its own yet
        await asyncio.sleep(CHECK_AGAIN_S)
        named.set()
        await loading
        (answer,) = await begin(engine, server, "a")
        server.end("a")
        assert (await answer).finish is Finish.STOP

    play(scenario)


def test_a_server_is_left_alone_while_it_loads_however_long_that_takes():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        loads = server.hold("load")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "load 2" in server.told)
        num_checks = server.num_checks
        await asyncio.sleep(2 * STUCK_AFTER_S)
        assert server.num_checks == num_checks
        loads.set()
        await loading
        await asyncio.sleep(STUCK_AFTER_S / 2)
        server.end("a")
        assert (await answer).finish is Finish.STOP

    play(scenario)


def test_a_line_that_breaks_during_a_load_is_taken_up_after_it():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        loads = server.hold("load")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "load 2" in server.told)
        server.drop("a", AWAY)
        await server.until(lambda: "a" not in server.inside)
        await asyncio.sleep(2 * DEAD_AFTER_S)
        assert len(server.calls) == 1
        loads.set()
        await loading
        await server.until_again("a", 2)
        await server.sample("a", 1)
        server.end("a")
        generation = await answer
        assert [(s.version, s.kv_version, len(s.tokens)) for s in generation.segments] == [(1, 1, 2), (2, 2, 1)]
        assert_is_true(generation)

    play(scenario)


def test_a_server_where_nobody_listened_during_a_load_has_other_weights_whatever_it_says_after_it():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        loads = server.hold("load")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "load 2" in server.told)
        server.drop("a", NOBODY)
        await server.until(lambda: "a" not in server.inside)
        loads.set()
        for ended in (loading, answer):
            with pytest.raises(EngineDied, match="nobody listens"):
                await ended

    play(scenario)


def test_a_server_that_answers_and_samples_nothing_is_stuck():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        await asyncio.sleep(2 * STUCK_AFTER_S)  # with nothing inside there is nothing to sample
        (answer,) = await begin(engine, server, "a")
        for _ in range(3):
            await asyncio.sleep(STUCK_AFTER_S - CHECK_EVERY_S)
            await server.sample("a")
        with pytest.raises(EngineDied, match=r"no token for \d+ s, although it has requests"):
            await answer
        assert now_s() > 6 * STUCK_AFTER_S - 4 * CHECK_EVERY_S

    play(scenario)


def test_closing_ends_what_runs_with_what_it_has_and_a_second_time_does_nothing():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        await engine.close()
        generation = await answer
        assert (generation.finish, len(generation.segments[0].tokens)) == (Finish.ABORT, 2)
        num_checks = server.num_checks
        await engine.close()
        await asyncio.sleep(2 * CHECK_EVERY_S)
        assert server.told == ["send a", "abort a"]
        assert server.num_checks == num_checks, "nobody looks any more"
        assert server.num_closes
        with pytest.raises(EngineDied, match=r"^engine w \(scripted 1.0\): it is closed"):
            await engine.generate(request("b"))

    play(scenario)


def test_a_dead_engine_is_closed_without_asking_its_server_anything():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        server.fail("load", AWAY)
        with pytest.raises(EngineDied):
            await engine.load(version(2))
        server.told.clear()
        await engine.close()
        assert (server.told, server.num_closes) == ([], 1)

    play(scenario)


def test_a_server_that_dies_while_it_is_closed_keeps_nobody():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.fail("abort", AWAY)
        await engine.close()
        with pytest.raises(EngineDied, match="the line is down"):
            await answer
        assert server.num_closes == 1

    play(scenario)
