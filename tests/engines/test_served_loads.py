"""An engine around a scripted server: weights change under its requests, and every token is of the version it says."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import ScriptedServer
from served_scenes import AWAY, assert_is_true, begin, play, request, version

from benchmarks.common.clock import now_s
from offbeat.engines.protocol import EngineDied, EngineError, Finish, KvMode
from offbeat.engines.server_engine import ABORTED_PAUSE_S, CHECK_EVERY_S, ServerEngine


def test_a_load_stages_while_tokens_come_and_changes_weights_while_none_do():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        staged, loaded = server.hold("stage"), server.hold("load")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "stage 2" in server.told)
        await server.sample("a", 2)
        (during,) = await begin(engine, server, "b")
        await asyncio.sleep(7)
        staged.set()
        await server.until(lambda: "load 2" in server.told)
        late = asyncio.create_task(engine.generate(request("c")))
        await asyncio.sleep(5)
        assert engine.version == 1
        assert server.calls_of("c") == []
        loaded.set()
        await loading
        assert (engine.version, engine.seconds_still) == (2, 5.0)
        await server.until_inside("c")
        assert server.told[-5:] == ["send b", "pause", "load 2", "resume", "send c"]
        for name in "abc":
            await server.sample(name, 1)
            server.end(name)
        generations = [await answer, await during, await late]
        versions = [[(s.version, s.kv_version) for s in generation.segments] for generation in generations]
        assert versions == [[(1, 1), (2, 2)], [(2, 2)], [(2, 2)]]
        for generation in generations:
            assert_is_true(generation)

    play(scenario)


def test_kept_and_forgotten_kv_do_not_mix_who_may_not_keep_it_is_moved_and_who_may_stays():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        stale = {"stays": 1, "far": 0, "new": 1}
        requests = [request("same"), *(request(name, KvMode.STALE, kv_lag) for name, kv_lag in stale.items())]
        answers = await begin(engine, server, *requests)
        for name in ("same", "stays", "far"):  # the new one has no token yet
            await server.sample(name, 2)
        await engine.load(version(2))
        await server.until_inside("same", *stale)
        assert server.told[4:8] == ["stage 2", "abort same far new", "pause keeping KV", "load 2"]
        assert [len(server.calls_of(name)) for name in ("same", "stays", "far", "new")] == [2, 1, 2, 2]
        for name in ("same", *stale):
            await server.sample(name, 1)
            server.end(name)
        generations = [await answer for answer in answers]
        told = {g.id: [(s.version, s.kv_version, len(s.tokens)) for s in g.segments] for g in generations}
        moved = [(1, 1, 2), (2, 2, 1)]
        assert told == {"same": moved, "stays": [(1, 1, 2), (2, 1, 1)], "far": moved, "new": [(2, 2, 1)]}
        assert now_s() == 0, "moving is no abort that nobody asked for"
        for generation in generations:
            assert_is_true(generation)

    play(scenario)


def test_where_kv_lags_too_far_to_be_kept_all_of_it_is_forgotten_and_nobody_moves():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        same, stale = await begin(engine, server, request("a"), request("b", KvMode.STALE, kv_lag=1))
        for number in (2, 3):
            for name in "ab":
                await server.sample(name)
            await engine.load(version(number))
            await server.until_inside("a", "b")
        for name in "ab":
            await server.sample(name)
            server.end(name)
        stops = [told for told in server.told if told.startswith(("pause", "abort"))]
        assert stops == ["abort a", "pause keeping KV", "pause"]
        assert [(s.version, s.kv_version) for s in (await same).segments] == [(1, 1), (2, 2), (3, 3)]
        assert [(s.version, s.kv_version) for s in (await stale).segments] == [(1, 1), (2, 1), (3, 3)]

    play(scenario)


@pytest.mark.parametrize("has_labels", [True, False])
def test_where_answers_do_not_tell_the_weights_every_request_leaves_for_a_load_and_is_carried_on(has_labels):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        answers = await begin(engine, server, "a", "b")
        await server.sample("a", 2)
        ended = server.hold("pause")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: server.told[-1] == "pause")
        assert server.inside == {}
        ended.set()
        await loading
        await server.until_inside("a", "b")
        await asyncio.sleep(2 * CHECK_EVERY_S)
        for name in "ab":
            await server.sample(name, 1)
            server.end(name)
        generations = [await answer for answer in answers]
        assert [[s.version for s in g.segments] for g in generations] == [[1, 2], [2]]
        for generation in generations:
            assert_is_true(generation)

    play(scenario, has_spans=False, has_labels=has_labels)


def test_after_a_move_an_abort_that_nobody_asked_for_is_one_again():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await engine.load(version(2))
        await server.until_again("a", 2)
        server.end("a", Finish.ABORT)
        await server.until_again("a", 3)
        assert now_s() == ABORTED_PAUSE_S
        server.end("a")
        await answer

    play(scenario, has_spans=False)


def test_what_is_aborted_while_it_moves_ends_with_what_it_has():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        moves = server.hold("abort")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "abort a" in server.told)
        aborting = asyncio.create_task(engine.abort())
        moves.set()
        await asyncio.gather(loading, aborting)
        generation = await answer
        assert (generation.finish, [s.version for s in generation.segments]) == (Finish.ABORT, [1])
        assert len(server.calls) == 1

    play(scenario, has_spans=False)


def test_loads_come_one_after_the_other_and_no_two_share_a_label_or_a_prefix():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        labels, salts = [], []
        for _ in range(2):
            await engine.load(version(1))
            labels.append(server.name)
            (answer,) = await begin(engine, server, "a")
            salts.append(server.calls[-1].salt)
            server.end("a")
            await answer
        assert len(set(labels)) == len(set(salts)) == 2
        server.told.clear()
        loads = server.hold("load")
        loading = [asyncio.create_task(engine.load(version(number))) for number in (2, 3)]
        await server.until(lambda: "load 2" in server.told)
        loads.set()
        await asyncio.gather(*loading)
        assert server.told == [word for n in "23" for word in (f"stage {n}", "pause", f"load {n}", "resume")]

    play(scenario)


def test_a_version_that_cannot_be_staged_is_refused_and_the_one_before_is_served_on():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.fail("stage", EngineError("version 2: cannot be read"))
        with pytest.raises(EngineError, match=r"^version 2: cannot be read") as e:
            await engine.load(version(2))
        assert not isinstance(e.value, EngineDied)
        await server.sample("a")
        server.end("a")
        assert [s.version for s in (await answer).segments] == [1]
        assert server.told[-1] == "stage 2"

    play(scenario)


def test_a_server_that_is_away_while_a_version_is_staged_is_dead():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        server.fail("stage", AWAY)
        with pytest.raises(EngineDied, match=r"^engine w \(scripted 1.0\): the line is down"):
            await engine.load(version(2))
        assert server.told == ["stage 2"]

    play(scenario)


def test_an_engine_that_died_while_a_version_was_staged_leaves_its_server_to_the_next_one():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        staged = server.hold("stage")
        loading = asyncio.create_task(engine.load(version(2)))
        server.name = "theirs"
        with pytest.raises(EngineDied, match="'theirs'"):
            await answer
        staged.set()
        with pytest.raises(EngineDied, match="'theirs'"):
            await loading
        assert server.told == ["send a", "stage 2"]

    play(scenario)


@pytest.mark.parametrize("step", ["pause", "load", "label", "resume"])
def test_a_load_that_fails_ends_the_engine_by_name_and_the_server_is_resumed_all_the_same(step):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        server.fail(step, AWAY)
        for call in (engine.load(version(2)), answer, engine.generate(request("b")), engine.abort()):
            with pytest.raises(EngineDied, match=r"^engine w \(scripted 1.0\): the line is down"):
                await call
        assert ("load 2" in server.told) is (step != "pause")
        assert server.told[-1] == "resume"
        assert (server.is_paused, server.inside) == (False, {})
        with pytest.raises(EngineDied):
            await engine.load(version(3))
        assert "stage 3" not in server.told, "there is no way back"

    play(scenario)


def test_a_load_that_is_cut_short_ends_the_engine():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        server.hold("label")
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: server.number == 2)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not server.is_paused
        with pytest.raises(EngineDied):
            await engine.abort()

    play(scenario, has_spans=False, has_labels=False)


def test_weights_that_are_not_called_as_they_were_loaded_are_refused_and_never_served():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        opened = server.hold("resume")
        server.takes_labels = False
        loading = asyncio.create_task(engine.load(version(2)))
        await server.until(lambda: "resume" in server.told)
        assert engine.version == 1
        opened.set()
        with pytest.raises(EngineDied, match=r"under the label '2-.*', but the server then reported the label '1-"):
            await loading

    play(scenario)


def test_a_label_that_changed_under_a_request_is_found_before_its_tokens_are_given_out():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, "a")
        await server.sample("a", 2)
        server.name = "theirs"
        server.end("a")
        with pytest.raises(EngineDied, match=r"label for its weights changed from '1-.*' to 'theirs'"):
            await answer
        with pytest.raises(EngineDied):
            await engine.generate(request("b"))

    play(scenario, has_spans=False)


def test_tokens_of_weights_that_nobody_here_loaded_end_every_request():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        answer, other = await begin(engine, server, "a", "b")
        server.name = "theirs"
        await server.sample("a", 2)
        server.end("a")
        for ended in (answer, other):
            with pytest.raises(
                EngineDied, match=r"engine w \(scripted 1.0\): the server sent tokens of weights labelled 'theirs'"
            ):
                await ended

    play(scenario)
