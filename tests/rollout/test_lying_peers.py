"""Peers that send damage, too much, too slowly, or something else: none is believed, and an honest one is asked."""

import asyncio
import os

import pytest
from aiohttp import web
from peer_machines import HURRIED, Root, asking, lying, name, serving, until

from offbeat.weights.pieces import PieceDamaged
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
