"""Events arrive whole however they are cut, or the error names the server, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from called_servers import all_events, break_off, hang, replying, saying, served, streaming
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engines import http_calls
from offbeat.engines.http_calls import Lines, ServerAway
from offbeat.engines.protocol import EngineError


def test_events_come_while_the_server_is_still_at_work():
    async def run():
        go_on = asyncio.Event()

        async def finish(request):
            await go_on.wait()

        async with served(streaming(b"data: 1\n\n", then=finish)) as (server, _):
            events = server.events("/events", {"stream": True})
            assert await anext(events) == b"1"
            go_on.set()
            with pytest.raises(StopAsyncIteration):
                await anext(events)

    asyncio.run(run())


@given(st.data())
def test_lines_are_the_same_however_they_are_cut(data):
    whole = data.draw(st.lists(st.sampled_from([b"\n", b"a", b"\r", b"data: ", b"xyz"]), max_size=30).map(b"".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    lines, found = Lines(), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += lines.feed(whole[start:end])
        assert lines.num_bytes_left == len(lines.left)
    assert [*found, lines.left] == whole.split(b"\n")


def test_events_cut_anywhere_on_the_wire_arrive_whole():
    wire = b': a comment\nevent: token\r\ndata: {"a":1}\r\n\r\nid: 7\ndata:{"b": 2}\n\ndata: [DONE]\n\n'

    async def run():
        for size in (1, 2, 7, len(wire)):
            pieces = [wire[at : at + size] for at in range(0, len(wire), size)]
            async with served(streaming(*pieces)) as (server, _):
                assert await all_events(server) == [b'{"a":1}', b'{"b": 2}', b"[DONE]"]

    asyncio.run(run())


def test_an_event_may_be_longer_than_any_buffer_on_the_way():
    long = b"7" * 9_000_000

    async def run():
        async with served(streaming(b"data: 1\n\ndata: " + long + b"\n\ndata: 2\n\n")) as (server, _):
            assert await all_events(server) == [b"1", long, b"2"]

    asyncio.run(run())


def test_an_event_without_an_end_is_refused_before_memory_is_full(monkeypatch):
    monkeypatch.setattr(http_calls, "MAX_LINE_BYTES", 100_000)

    async def flood(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"7" * 10_000)

    async def run():
        async with served(flood) as (server, visits):
            with pytest.raises(
                EngineError, match=f"{server.url}/events: the server sent an event longer than 100000 bytes"
            ):
                await all_events(server)
            await visits.was_left.wait()

    asyncio.run(run())


@pytest.mark.parametrize("begun", [b"", b"da", b'data: {"a": '])
def test_a_stream_that_breaks_off_gives_what_came_whole_and_then_names_the_server(begun):
    async def run():
        go_on = asyncio.Event()

        async def end(request):
            await go_on.wait()
            await break_off(request)

        async with served(streaming(b"data: 1\n\ndata: 2\n\n" + begun, then=end)) as (server, _):
            events = server.events("/events", None)
            assert [await anext(events), await anext(events)] == [b"1", b"2"]
            go_on.set()
            with pytest.raises(ServerAway) as error:
                await anext(events)
            assert str(error.value).startswith(f"{server.url}/events: ")

    asyncio.run(run())


def test_an_event_cut_off_by_a_connection_that_ends_is_never_taken_for_a_whole_one():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

    async def run():
        async with saying(head + b"data: 1\n\ndata: 23") as server:
            events = server.events("/events", None)
            assert await anext(events) == b"1"
            with pytest.raises(ServerAway, match="broke off inside an event: data: 23"):
                await anext(events)
        async with saying(head + b"data: 1\n\ndata: 23\n\n") as server:
            assert await all_events(server) == [b"1", b"23"]

    asyncio.run(run())


def test_an_answer_in_place_of_a_stream_is_quoted():
    async def run():
        async with served(replying(body=b'{"error": "no streams here"}')) as (server, _):
            with pytest.raises(ServerAway, match="no streams here"):
                await all_events(server)

    asyncio.run(run())


def test_a_stream_that_is_closed_or_cancelled_frees_the_server_of_it():
    async def run():
        async with served(streaming(b"data: 1\n\n", then=hang)) as (server, visits):
            events = server.events("/events", None)
            assert await anext(events) == b"1"
            await events.aclose()
            await visits.was_left.wait()
        async with served(hang) as (server, visits):
            reading = asyncio.ensure_future(all_events(server))
            await visits.has_come.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await visits.was_left.wait()

    asyncio.run(run())
