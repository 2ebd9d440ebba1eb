"""An engine around a scripted server: a request whose last token came just before its call was cut off is over, and
nothing more is asked for it."""

from __future__ import annotations

import msgspec
import pytest
from scripted_server import ScriptedServer
from served_scenes import AWAY, PROMPT, assert_is_true, begin, play, request, version

from offbeat.engines.protocol import Finish, Generation, Request
from offbeat.engines.server_engine import ServerEngine

NUM_TOKENS = 10
LAST = len(PROMPT) + NUM_TOKENS - 1
"""A token is its own place in the text."""


def asked(name: str, **sampling: object) -> Request:
    wanted = request(name)
    return Request(wanted.id, wanted.tokens, wanted.seed, msgspec.structs.replace(wanted.sampling, **sampling))


async def load(engine: ServerEngine, server: ScriptedServer) -> None:
    await engine.load(version(2))


async def abort(engine: ServerEngine, server: ScriptedServer) -> None:
    await engine.abort()


async def drop(engine: ServerEngine, server: ScriptedServer) -> None:
    server.drop("a", AWAY)


@pytest.mark.parametrize("cut", [load, abort, drop])
@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        ({"max_new_tokens": NUM_TOKENS}, Finish.LENGTH),
        ({"stop_token_ids": (LAST,)}, Finish.STOP),
        ({"stop_token_ids": (LAST,), "max_new_tokens": NUM_TOKENS}, Finish.STOP),
    ],
)
def test_a_request_that_is_cut_off_after_its_last_token_ends_as_it_would_have(cut, sampling, finish):
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, asked("a", **sampling))
        await server.sample("a", NUM_TOKENS)
        await cut(engine, server)
        generation: Generation = await answer
        assert (generation.finish, len(server.calls_of("a"))) == (finish, 1)
        assert [(s.version, len(s.tokens)) for s in generation.segments] == [(1, NUM_TOKENS)]
        assert_is_true(generation)

    play(scenario, has_spans=False)


def test_one_that_is_cut_off_a_token_earlier_is_carried_on():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, asked("a", max_new_tokens=NUM_TOKENS))
        await server.sample("a", NUM_TOKENS - 1)
        await engine.load(version(2))
        await server.until_again("a", 2)
        await server.sample("a", 1)
        server.end("a", Finish.LENGTH)
        generation = await answer
        assert [(s.version, len(s.tokens)) for s in generation.segments] == [(1, NUM_TOKENS - 1), (2, 1)]
        assert server.calls_of("a")[1].sampling.max_new_tokens == 1
        assert [call.label for call in server.calls_of("a")] != [server.name] * 2
        assert server.calls_of("a")[1].label == server.name

    play(scenario, has_spans=False)


def test_one_whose_server_does_not_say_in_time_what_its_weights_are_called_is_over_once_it_does():
    async def scenario(engine: ServerEngine, server: ScriptedServer) -> None:
        (answer,) = await begin(engine, server, asked("a", max_new_tokens=NUM_TOKENS))
        await server.sample("a", NUM_TOKENS)
        server.fail("label", AWAY)
        server.end("a", Finish.LENGTH)
        generation = await answer
        assert (generation.finish, len(server.calls_of("a"))) == (Finish.LENGTH, 1)
        assert [(s.version, len(s.tokens)) for s in generation.segments] == [(1, NUM_TOKENS)]

    play(scenario, has_spans=False)
