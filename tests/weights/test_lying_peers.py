"""Peers that send damage, too much, too slowly, or something else: none is believed, and an honest one is asked."""

import asyncio
import math
import os

import pytest
from aiohttp import web
from peer_machines import HURRIED, KEY, Root, asking, lying, name, serving, until

from offbeat.weights.download import NUM_PARALLEL
from offbeat.weights.peers import UNKNOWN_BYTES_PER_S, Patience
from offbeat.weights.piece_store import PieceDamaged
from offbeat.weights.signing import SigningKey, seal


async def _send(request, data, num_bytes):
    """Answers a call for a piece that has so many bytes with this data."""
    start = int(request.headers["Range"][6:].partition("-")[0]) if "Range" in request.headers else 0
    response = web.StreamResponse(status=206 if start else 200)
    if start:
        response.headers["Content-Range"] = f"bytes {start}-{num_bytes - 1}/{num_bytes}"
    await response.prepare(request)
    await response.write(data[start:])
    await response.write_eof()
    return response


def test_a_peer_that_sends_damage_is_found_out_and_not_asked_again(root_store, tmp_path, data):
    damaged = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]

    async def run():
        root, now_s = Root(root_store), 0.0
        async with lying(lambda request: _send(request, damaged, len(data))) as (url, calls):
            async with asking(root, url, clock=lambda: now_s) as sources:
                for number in range(3):
                    await sources.piece(name(data), len(data), tmp_path / str(number))
                    assert (tmp_path / str(number)).read_bytes() == data
                    now_s += 90.0
            assert len(calls) == 1
        assert root.num_pieces == 3

    asyncio.run(run())


def test_a_peer_that_never_stops_sending_is_left(root_store, tmp_path, data):
    async def run():
        async def endless(request):
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(data)

        async with lying(endless) as (url, _), asking(Root(root_store), url) as sources:
            await asyncio.wait_for(sources.piece(name(data), len(data), tmp_path / "piece"), 20)
        assert (tmp_path / "piece").read_bytes() == data

    asyncio.run(run())


@pytest.mark.parametrize("sent", ["short", "long", "nothing"])
def test_a_peer_that_sends_too_little_or_too_much_is_left(root_store, tmp_path, data, sent):
    answer = {"short": data[:-1], "long": data + b"x", "nothing": b""}[sent]

    async def run():
        async with lying(lambda request: _send(request, answer, len(data))) as (url, _):
            async with asking(Root(root_store), url) as sources:
                await sources.piece(name(data), len(data), tmp_path / "piece")
            assert (tmp_path / "piece").read_bytes() == data

    asyncio.run(run())


def test_a_damaged_beginning_by_another_does_not_make_an_honest_peer_a_liar(store, root_store, tmp_path):
    data, part = os.urandom(4_000_000), tmp_path / "piece"
    store.put(name(data), data)

    async def run():
        async def damaged_half(request):
            response = web.StreamResponse()
            response.content_length = len(data)
            await response.prepare(request)
            await response.write(bytes(2_000_000))
            await until(lambda: part.exists() and part.stat().st_size)
            request.transport.close()
            return response

        root = Root(root_store)
        async with lying(damaged_half) as (url, _), serving(store) as server, asking(root, url, server.url) as sources:
            await sources.piece(name(data), len(data), part)
            assert part.read_bytes() == data
            assert sources.num_bytes[url] > 0
            assert sources._ranking.order() == [server.url, "", url]
        assert root.num_pieces == 0

    asyncio.run(run())


def test_a_range_that_was_not_asked_for_is_not_taken(root_store, tmp_path, data):
    (tmp_path / "piece").write_bytes(data[:1000])

    async def run():
        async def other_range(request):
            return web.Response(status=206, headers={"Content-Range": "bytes 0-9/300000"}, body=data[:10])

        async with lying(other_range) as (url, _), asking(Root(root_store), url) as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
            assert sources.num_bytes == {url: 0, "": len(data) - 1000}

    asyncio.run(run())


def test_a_peer_that_drips_is_left_and_a_silent_one_too(root_store, tmp_path, data):
    async def run():
        async def drip(request):
            response = web.StreamResponse()
            response.content_length = len(data)
            await response.prepare(request)
            for at in range(len(data)):
                await response.write(data[at : at + 1])
                await asyncio.sleep(0.05)

        async def silence(request):
            await asyncio.sleep(3600)

        root = Root(root_store)
        async with lying(drip) as (slow, drips), lying(silence) as (dead, silences):
            async with asking(root, slow, dead, patience=HURRIED) as sources:
                await asyncio.wait_for(sources.piece(name(data), len(data), tmp_path / "piece"), 60)
                assert sources.num_bytes[slow] > 0
            assert len(drips) == len(silences) == 1
        assert (tmp_path / "piece").read_bytes() == data
        assert root.num_pieces == 1

    asyncio.run(run())


def test_a_root_that_sends_damage_is_not_believed_either(tmp_path, data):
    async def run():
        class Liar:
            async def piece(self, digest, num_bytes, into):
                into.write_bytes(bytes(num_bytes))

        async with asking(Liar()) as sources:
            with pytest.raises(PieceDamaged, match="the root"):
                await sources.piece(name(data), len(data), tmp_path / "piece")

    asyncio.run(run())


def test_a_manifest_comes_from_a_peer_and_is_the_one_asked_for(store, root_store, tmp_path):
    sealed = seal(b'{"number":7}', SigningKey.generate())
    digest = name(b'{"number":7}')
    for place in (store, root_store):
        place.put_manifest(7, digest, sealed)

    async def run():
        root = Root(root_store)
        async with serving(store) as server, asking(root, server.url) as sources:
            assert await sources.manifest(7, digest) == sealed
            assert root.num_manifests == 0
            assert await sources.manifest(7, "") == sealed  # only the root knows which is meant
            assert root.num_manifests == 1

        async def another(request):
            return web.Response(body=b'{"number":8}\n{"signature":"of nobody"}')

        async with lying(another) as (url, calls), asking(root, url) as sources:
            for _ in range(2):
                assert await sources.manifest(7, digest) == sealed
            assert len(calls) == 1

    asyncio.run(run())


def test_a_manifest_that_the_caller_could_not_use_is_asked_for_elsewhere(store, root_store):
    data = b'{"number":7}'
    good, foreign = seal(data, SigningKey.generate()), seal(data, SigningKey.generate())
    store.put_manifest(7, name(data), foreign)
    root_store.put_manifest(7, name(data), good)

    async def run():
        async with serving(store) as server, asking(Root(root_store), server.url) as sources:
            assert await sources.manifest(7, name(data)) == foreign
            assert await sources.manifest(7, name(data)) == good

    asyncio.run(run())


class Hours:
    """A clock that a peer moves on with each of its answers."""

    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize("header", [{}, {"Offbeat-Arrived": "0"}, {"Offbeat-Arrived": "12345"}])
def test_a_peer_at_which_nothing_comes_in_is_left_within_seconds(root_store, tmp_path, data, header):
    """It says for ever that the piece is on its way."""
    clock, patience = Hours(), Patience(poll_s=0.001)

    async def run():
        async def soon(request):
            clock.now_s += 1.0
            return web.Response(status=503, headers=header)

        async with lying(soon) as (url, calls), asking(Root(root_store), url, clock=clock, patience=patience) as ours:
            await ours.piece(name(data), len(data), tmp_path / "piece")
            assert (tmp_path / "piece").read_bytes() == data
            assert len(calls) <= patience.still_s + 2

    asyncio.run(run())


def test_a_peer_that_lies_about_what_comes_in_is_left_when_the_piece_should_be_there(root_store, tmp_path, data):
    clock, patience = Hours(), Patience(poll_s=0.001)
    most_s = patience.still_s + NUM_PARALLEL * len(data) / UNKNOWN_BYTES_PER_S

    async def run():
        async def soon(request):
            clock.now_s += 1.0
            return web.Response(status=503, headers={"Offbeat-Arrived": str(clock.now_s)})

        async with lying(soon) as (url, calls), asking(Root(root_store), url, clock=clock, patience=patience) as ours:
            await ours.piece(name(data), len(data), tmp_path / "piece")
            assert len(calls) <= math.ceil(most_s) + 1

    asyncio.run(run())


def test_a_peer_to_which_the_piece_is_really_coming_is_waited_for(root_store, tmp_path, data):
    """Although each of its answers takes nearly as long as nothing may come in."""
    clock, patience = Hours(), Patience(poll_s=0.001)

    async def run():
        async def soon(request):
            clock.now_s += patience.still_s - 1.0
            if len(calls) < 4:
                return web.Response(status=503, headers={"Offbeat-Arrived": str(len(calls))})
            return await _send(request, data, len(data))

        root = Root(root_store)
        async with lying(soon) as (url, calls), asking(root, url, clock=clock, patience=patience) as ours:
            await ours.piece(name(data), len(data), tmp_path / "piece")
            assert ours.num_bytes == {url: len(data)}
        assert root.num_pieces == 0

    asyncio.run(run())


def test_a_peer_slower_than_any_line_is_left_even_where_nobody_knows_another(root_store, tmp_path, data):
    """30 kB a second: above what is as good as silence, and a large piece would take an hour."""
    clock = Hours()

    async def run():
        async def drip(request):
            response = web.StreamResponse()
            await response.prepare(request)
            for at in range(0, len(data), 30_000):
                clock.now_s += 1.0
                await response.write(data[at : at + 30_000])
                await asyncio.sleep(0.01)
            return response

        root = Root(root_store)
        async with lying(drip) as (url, _), asking(root, url, clock=clock, patience=Patience()) as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
            assert 0 < sources.num_bytes[url] <= 150_000
        assert (tmp_path / "piece").read_bytes() == data

    asyncio.run(run())


async def _drip(request, response):
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"x")
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("status", [200, 404])
def test_a_manifest_or_a_refusal_that_drips_is_left(root_store, status):
    data = b'{"number":7}'
    root_store.put_manifest(7, name(data), seal(data, SigningKey.generate()))

    async def run():
        async with (
            lying(lambda request: _drip(request, web.StreamResponse(status=status))) as (url, calls),
            asking(Root(root_store), url, patience=HURRIED) as sources,
        ):
            assert (await asyncio.wait_for(sources.manifest(7, name(data)), 20)).startswith(data)
            assert len(calls) == 1

    asyncio.run(run())


def test_an_answer_whose_head_drips_is_left(root_store, tmp_path, data):
    async def run():
        async def drip(reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\n")
            for number in range(1000):
                writer.write(f"X-{number}: y\r\n".encode())
                await asyncio.sleep(0.05)

        listener = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with asking(Root(root_store), url, patience=HURRIED) as sources:
            await asyncio.wait_for(sources.piece(name(data), len(data), tmp_path / "piece"), 20)
        listener.close()
        assert (tmp_path / "piece").read_bytes() == data

    asyncio.run(run())


def test_a_key_is_shown_to_its_own_peer_alone_and_nobody_is_sent_elsewhere_with_it(root_store, tmp_path, data):
    async def run():
        async def answer(request):
            return web.Response(status=404)

        async with lying(answer) as (first, calls), lying(answer) as (second, others), asking(Root(root_store)) as ours:

            async def redirect(request):
                raise web.HTTPFound(f"{second}/stolen")

            async with lying(redirect) as (third, _):
                ours.use({first: "for the first", second: "for the second", third: KEY})
                await ours.piece(name(data), len(data), tmp_path / "piece")
            assert [call.headers["Authorization"] for call in calls] == ["Bearer for the first"]
            assert [call.headers["Authorization"] for call in others] == ["Bearer for the second"]

    asyncio.run(run())
