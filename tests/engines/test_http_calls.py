"""Calls to a server end by an answer or by one line that names the server, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web
from called_servers import LONG_S, all_events, hang, replying, saying, served, streaming

from offbeat.engines import http_calls
from offbeat.engines.http_calls import Server, ServerAway, ServerRefused
from offbeat.engines.protocol import EngineError
from offbeat.errors import UserError

# Answers


def test_a_call_sends_json_with_the_key_and_the_query_and_returns_what_came_back():
    async def echo(request):
        told = {"method": request.method, "path": request.path_qs, "key": request.headers.get("Authorization")}
        return web.json_response({**told, "body": (await request.read()).decode()})

    async def run():
        async with served(echo, api_key="secret") as (server, visits):
            said = await server.post("/pause", {"ids": [1, 2]}, mode="keep", clear_cache="true")
            assert said["path"] == "/pause?mode=keep&clear_cache=true"
            assert (said["method"], said["key"], said["body"]) == ("POST", "Bearer secret", '{"ids":[1,2]}')
            assert visits.calls[0].content_type == "application/json"
            said = await server.get("/is_paused", of="a/b c&d")
            assert (said["method"], said["body"]) == ("GET", "")
            assert visits.calls[1].query["of"] == "a/b c&d"

    asyncio.run(run())


def test_an_empty_answer_is_none_and_text_is_text():
    async def run():
        async with served(replying()) as (server, _):
            assert await server.post("/resume") is None
        async with served(replying(body=b"a 1\nb \xff\n")) as (server, _):
            assert await server.text("/metrics") == "a 1\nb \N{REPLACEMENT CHARACTER}\n"

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"<html>busy</html>", b"\xff\xfe", b'"\xff"', b"[" * 100_000, b'{"a": 1'])
def test_an_answer_that_is_not_json_is_quoted(body):
    async def run():
        async with served(replying(body=body)) as (server, _):
            with pytest.raises(EngineError) as error:
                await server.get("/version")
            told = str(error.value)
            assert told.startswith(f"{server.url}/version: the server's answer is not JSON: ")
            assert len(told) < 400
            assert not isinstance(error.value, ServerAway | ServerRefused)

    asyncio.run(run())


# Refusals


@pytest.mark.parametrize(
    "body, told",
    [
        (b'{"error": {"message": "no such\\n call", "type": "NotFound", "code": 404}}', "no such call"),
        (b'{"error": "paused"}', "paused"),
        (b'{"error": true, "message": "out of memory"}', "out of memory"),
        (b'{"success": false, "message": "Failed to load"}', "Failed to load"),
        (
            b'{"detail": [{"loc": ["body", "tokens"], "msg": "missing"}]}',
            "[{'loc': ['body', 'tokens'], 'msg': 'missing'}]",
        ),
        (b'{"code": 7}', "{'code': 7}"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", "no reason given"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b'"\xff"', '"\N{REPLACEMENT CHARACTER}"'),
        (b"x" * 1000, "x" * 300 + "…"),
        (b"[" * 100_000, "[" * 300 + "…"),
    ],
)
def test_a_refusal_names_the_server_the_status_and_what_it_said(body, told):
    async def run():
        async with served(replying(status=503, body=body)) as (server, _):
            for path, call in (("/health", server.get("/health")), ("/events", all_events(server))):
                with pytest.raises(ServerRefused) as error:
                    await call
                assert str(error.value) == f"{server.url}{path}: the server answered with status 503: {told}"
                assert error.value.status == 503

    asyncio.run(run())


def test_a_redirection_is_not_followed_because_a_post_would_arrive_as_something_else():
    answer = replying(status=302, headers={"Location": "http://elsewhere:1/pause"})

    async def run():
        async with served(answer) as (server, visits):
            for path, call in (("/pause", server.post("/pause")), ("/events", all_events(server))):
                with pytest.raises(ServerRefused) as error:
                    await call
                assert (
                    str(error.value)
                    == f"{server.url}{path}: the server answered with status 302: a redirect to http://elsewhere:1/pause"
                )
            assert len(visits.calls) == 2

    asyncio.run(run())


# Servers that are away


@pytest.mark.parametrize("num_cuts, is_heard", [(1, True), (2, False)])
def test_a_call_whose_connection_is_cut_before_the_answer_is_made_once_more(num_cuts, is_heard):
    calls = []

    async def cut(request):
        calls.append(request)
        if len(calls) <= num_cuts:
            request.transport.abort()
        return web.json_response("well")

    async def run():
        async with served(cut) as (server, _):
            if is_heard:
                assert await server.post("/abort_requests", {"request_ids": ["a"]}) == "well"
            else:
                with pytest.raises(ServerAway, match=f"^{server.url}/abort_requests: .*"):
                    await server.post("/abort_requests", {"request_ids": ["a"]})
            assert len(calls) == 2

    asyncio.run(run())


def test_a_deadline_that_passes_is_named_with_the_server_and_the_call_is_given_up():
    async def run():
        async with served(hang) as (server, visits):
            with pytest.raises(ServerAway) as error:
                await server.get("/health", within_s=0.1)
            assert str(error.value) == f"{server.url}/health: the server gave no answer within 0.1 s"
            await visits.was_left.wait()

    asyncio.run(run())


@pytest.mark.parametrize("within_s", [0.0, -1.0])
def test_no_time_left_means_no_time_and_not_for_ever(within_s):
    async def run():
        async with served(hang) as (server, _):
            with pytest.raises(ServerAway, match="no answer within"):
                await server.get("/health", within_s=within_s)

    asyncio.run(run())


def test_an_answer_that_begins_and_does_not_end_is_late_all_the_same():
    async def run():
        async with served(streaming(b'{"a', then=hang)) as (server, _):
            with pytest.raises(ServerAway, match="no answer within"):
                await server.get("/version", within_s=0.1)

    asyncio.run(run())


def test_a_refusal_that_does_not_end_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(http_calls, "CALL_WITHIN_S", 0.1)

    async def answer(request):
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        await response.write(b"because")
        await hang(request)

    async def run():
        async with served(answer) as (server, _):
            with pytest.raises(ServerAway, match=f"{server.url}/events: "):
                await all_events(server)

    asyncio.run(run())


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_where_nobody_listens_the_connection_is_refused_and_that_is_said(host):
    async def run():
        server = Server(f"http://{host}:{unused_port()}/")
        for path, call in (("/health", server.get("/health")), ("/events", all_events(server))):
            with pytest.raises(ServerAway) as error:
                await call
            assert str(error.value).startswith(f"{server.url}{path}: ClientConnectorError: ")
            assert "\n" not in str(error.value)
            assert error.value.is_refused
        await server.close()

    asyncio.run(run())


def test_a_connection_that_does_not_come_about_has_a_deadline_of_its_own_which_is_not_called_the_calls(monkeypatch):
    monkeypatch.setattr(http_calls, "CONNECT_WITHIN_S", 0.2)

    async def run():
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket())
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(4):  # nobody accepts them, and there is no room for more
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            server = Server(f"http://127.0.0.1:{full.getsockname()[1]}")
            for path, call in (("/load", server.get("/load", within_s=LONG_S)), ("/events", all_events(server))):
                with pytest.raises(ServerAway) as error:
                    await call
                assert str(error.value).startswith(f"{server.url}{path}: ConnectionTimeoutError: ")
                assert not error.value.is_refused
            await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", b"SSH-2.0-OpenSSH_9.9\r\n"])
def test_a_server_that_hangs_up_or_speaks_something_else_is_away(said):
    async def run():
        async with saying(said) as server:
            for path, call in (("/x", server.get("/x")), ("/events", all_events(server))):
                with pytest.raises(ServerAway) as error:
                    await call
                assert str(error.value).startswith(f"{server.url}{path}: ")
                assert not error.value.is_refused

    asyncio.run(run())


# Connections


def test_a_connection_is_kept_for_the_next_call_also_after_a_refusal_and_a_stream_read_to_its_end():
    async def answer(request):
        if request.path == "/events":
            return await streaming(b"data: 1\n\n")(request)
        return web.json_response({}, status=404 if request.path == "/none" else 200)

    async def run():
        async with served(answer) as (server, visits):
            for _ in range(3):
                await server.get("/version")
                await server.post("/resume")
                with pytest.raises(ServerRefused):
                    await server.get("/none")
                assert await all_events(server) == [b"1"]
            assert len(visits.calls) == 12
            assert len(visits.connections) == 1

    asyncio.run(run())


def test_many_streams_run_side_by_side_and_none_waits_for_another():
    async def run():
        all_here, num_here = asyncio.Event(), 0

        async def meet(request):
            nonlocal num_here
            num_here += 1
            if num_here == 150:
                all_here.set()
            await all_here.wait()

        async with served(streaming(b"data: 1\n\n", then=meet)) as (server, _):
            assert await asyncio.gather(*(all_events(server) for _ in range(150))) == [[b"1"]] * 150

    asyncio.run(run())


def test_a_server_that_was_restarted_is_reached_again_over_a_connection_of_its_own():
    async def start(port):
        runner = web.ServerRunner(web.Server(replying(body=b"1")))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        return runner, site._server.sockets[0].getsockname()[1]

    async def run():
        first, port = await start(0)
        server = Server(f"http://127.0.0.1:{port}")
        assert await server.post("/x") == 1
        await first.cleanup()
        with pytest.raises(ServerAway):
            await server.post("/x")
        second, _ = await start(port)
        assert await server.post("/x") == 1
        await server.close()
        await second.cleanup()

    asyncio.run(run())


def test_once_closed_it_is_away_for_good_and_what_was_under_way_ends():
    async def run():
        async with served(hang) as (server, visits):
            under_way = [
                asyncio.ensure_future(call) for call in (server.get("/x", within_s=LONG_S), all_events(server))
            ]
            while len(visits.calls) < 2:
                await visits.has_come.wait()
                visits.has_come.clear()
            await server.close()
            for call in under_way:
                with pytest.raises(ServerAway, match=server.url):
                    await call
            for call in (server.get("/x"), all_events(server)):
                with pytest.raises(ServerAway, match="client of the server is closed"):
                    await call
            await server.close()

    asyncio.run(run())


# What a user may have written


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:8000", "ftp://host", "http://", "http://:8000", "http://host:99999", "http://host:0"),
        *("http://host:x", "http://host/?a=b", "http://host#x", "http://[::1"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused_in_one_line(url):
    with pytest.raises(UserError) as error:
        Server(url)
    assert str(error.value).startswith(f"{url}: ")


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(UserError) as error:
        Server("http://me:secret@host:8000")
    assert "secret" not in str(error.value)
    assert "host" in str(error.value)


@pytest.mark.parametrize("key", ["secret\n", "a\rb", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_repeated(key):
    with pytest.raises(UserError, match="key") as error:
        Server("http://host", api_key=key)
    assert key.strip() not in str(error.value)


def test_a_url_may_end_in_a_slash_and_lie_below_a_path():
    async def run():
        async with served(replying(body=b"1")) as (server, visits):
            below = Server(f"{server.url}/engines/one/")
            assert await below.get("/health") == 1
            assert visits.calls[0].path == "/engines/one/health"
            await below.close()

    asyncio.run(run())


def test_a_server_at_a_socket_of_this_machine_is_called_like_any_other(tmp_path):
    place = tmp_path / "engine"

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"path": request.path})

    async def run():
        server = Server(f"unix:{place}")
        with pytest.raises(ServerAway, match=f"^unix:{place}/health: ") as caught:
            await server.get("/health")
        assert caught.value.is_refused
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.UnixSite(runner, str(place)).start()
        assert await server.get("/health") == {"path": "/health"}
        await server.close()
        await runner.cleanup()

    asyncio.run(run())
