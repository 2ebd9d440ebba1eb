"""Workers that fetch pieces from each other, over real sockets; those who lie are in `test_lying_peers.py`."""

import asyncio
import contextlib
import os
import subprocess
import sys

import pytest
from aiohttp import web
from peer_machines import KEY, Root, asking, lying, name, serving, until
from support_files import SUPPORT

from benchmarks.relay.link import Link
from offbeat.errors import OffbeatError
from offbeat.weights.piece_store import FolderStore, PieceMissing


def test_a_peer_is_asked_and_the_root_is_spared(store, root_store, tmp_path, data):
    store.put(name(data), data)

    async def run():
        root = Root(root_store)
        async with serving(store) as server, asking(root, server.url) as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
            assert sources.num_bytes == {server.url: len(data)}
        assert (tmp_path / "piece").read_bytes() == data
        assert root.num_pieces == 0

    asyncio.run(run())


def test_a_dead_parent_costs_one_attempt_and_the_next_goes_on(store, root_store, tmp_path):
    pieces = [os.urandom(1000) for _ in range(5)]
    for piece in pieces:
        store.put(name(piece), piece)

    async def run():
        async def hang_up(request):
            request.transport.abort()
            await asyncio.sleep(60)

        root = Root(root_store)
        async with (
            lying(hang_up) as (dead, calls),
            serving(store) as server,
            asking(root, dead, server.url, clock=lambda: 0.0) as sources,
        ):
            for number, piece in enumerate(pieces):
                await sources.piece(name(piece), len(piece), tmp_path / str(number))
                assert (tmp_path / str(number)).read_bytes() == piece
            assert len(calls) <= 2  # the HTTP client itself makes a call that was dropped once more
        assert root.num_pieces == 0

    asyncio.run(run())


def test_nobody_listening_falls_back_to_the_root(root_store, tmp_path, data):
    async def run():
        root = Root(root_store)
        async with asking(root, "http://127.0.0.1:1", "not a URL") as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
        assert (tmp_path / "piece").read_bytes() == data
        assert root.num_pieces == 1

    asyncio.run(run())


def test_what_one_began_another_ends(store, root_store, tmp_path):
    """An earlier process broke off in the middle, and so does a peer: hardly a byte is fetched twice."""
    data, part = os.urandom(4_000_000), tmp_path / "piece"
    store.put(name(data), data)
    part.write_bytes(data[:1000])

    async def run():
        async def half(request):
            span = f"1000-{len(data) - 1}"
            assert request.headers["Range"] == f"bytes={span}"
            response = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {span}/{len(data)}"})
            response.content_length = len(data) - 1000
            await response.prepare(request)
            await response.write(data[1000:2_000_000])
            await until(lambda: part.exists() and part.stat().st_size > 1000)
            request.transport.close()
            return response

        async with lying(half) as (url, _), serving(store) as server, asking(Root(root_store), url, server.url) as ours:
            await ours.piece(name(data), len(data), part)
            assert part.read_bytes() == data
            assert ours.num_bytes[url] + ours.num_bytes[server.url] == len(data) - 1000
            assert ours.num_bytes[url] > 0

    asyncio.run(run())


def test_a_peer_killed_in_the_middle_of_a_piece_is_followed_by_the_root(store, root_store, tmp_path):
    data, part = os.urandom(8_000_000), tmp_path / "piece"
    for place in (store, root_store):
        place.put(name(data), data)

    async def run():
        command = [sys.executable, str(SUPPORT / "killable_peer.py"), str(store.folder), KEY]
        peer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            port = int(await asyncio.wait_for(peer.stdout.readline(), 60))
            async with Link(port, bytes_per_s=4e6) as link, asking(Root(root_store), link.url) as sources:
                fetching = asyncio.create_task(sources.piece(name(data), len(data), part))
                await until(lambda: part.exists() and part.stat().st_size)
                peer.kill()
                await asyncio.wait_for(fetching, 60)
                assert part.read_bytes() == data
                assert 0 < sources.num_bytes[link.url] < len(data)
                assert sources.num_bytes[""] == len(data) - sources.num_bytes[link.url]
        finally:
            if peer.returncode is None:
                peer.kill()
            await peer.wait()

    asyncio.run(run())


@pytest.mark.parametrize("left", [b"damaged", bytes(300_000), bytes(400_000)])
def test_rubbish_left_in_the_file_is_fetched_anew(store, root_store, tmp_path, data, left):
    store.put(name(data), data)
    (tmp_path / "piece").write_bytes(left)

    async def run():
        async with serving(store) as server, asking(Root(root_store), server.url) as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
            assert (tmp_path / "piece").read_bytes() == data
            assert sources._ranking.order()[0] == server.url

    asyncio.run(run())


def test_a_peer_that_does_not_have_it_is_passed_over(store, root_store, tmp_path, data):
    async def run():
        root = Root(root_store)
        async with serving(store) as server, asking(root, server.url) as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
        assert (tmp_path / "piece").read_bytes() == data
        assert root.num_pieces == 1

    asyncio.run(run())


def test_what_the_root_says_is_what_is_raised(tmp_path, store):
    async def run():
        nothing = FolderStore(tmp_path / "nothing")
        async with serving(store) as server, asking(Root(nothing), server.url) as sources:
            with pytest.raises(PieceMissing):
                await sources.piece("ab" * 32, 10, tmp_path / "piece")
            with pytest.raises(PieceMissing):
                await sources.manifest(1, "ab" * 32)

    asyncio.run(run())


def test_those_who_rest_are_asked_when_the_root_cannot_help(tmp_path, store, data):
    async def run():
        async with serving(store) as server, asking(Root(FolderStore(tmp_path / "nothing")), server.url) as sources:
            with pytest.raises(PieceMissing):
                await sources.piece(name(data), len(data), tmp_path / "piece")
            store.put(name(data), data)
            await sources.piece(name(data), len(data), tmp_path / "piece")
        assert (tmp_path / "piece").read_bytes() == data

    asyncio.run(run())


def test_a_disk_that_takes_nothing_is_nobody_elses_fault(root_store, store, data, tmp_path):
    store.put(name(data), data)

    async def run():
        async with serving(store) as server, asking(Root(root_store), server.url) as sources:
            with pytest.raises(OffbeatError, match="cannot be written: No such file"):
                await sources.piece(name(data), len(data), tmp_path / "nowhere" / "piece")
            assert sources._ranking.order()[0] == server.url

    asyncio.run(run())


def test_a_wrong_key_is_a_failed_attempt(store, root_store, tmp_path, data):
    store.put(name(data), data)

    async def run():
        root = Root(root_store)
        async with serving(store) as server, asking(root, server.url, key="another") as sources:
            await sources.piece(name(data), len(data), tmp_path / "piece")
            assert root.num_pieces == 1

    asyncio.run(run())


def test_a_version_runs_through_a_chain_of_relays_and_the_root_sends_each_piece_once(root_store, tmp_path):
    pieces = [os.urandom(20_000 + number) for number in range(12)]
    for piece in pieces:
        root_store.put(name(piece), piece)

    async def run():
        root = Root(root_store)
        async with contextlib.AsyncExitStack() as stack:
            workers, line = [], []
            for number in range(4):
                store, expected = FolderStore(tmp_path / f"worker{number}"), {name(piece) for piece in pieces}
                server = await stack.enter_async_context(serving(store, expects=expected.__contains__))
                sources = await stack.enter_async_context(asking(root, *reversed(line)))
                workers.append(_take_all(pieces, store, expected, server, sources, tmp_path / f"parts{number}"))
                line.append(server.url)
            await asyncio.gather(*reversed(workers))  # the last of the chain asks first
        assert root.num_pieces == len(pieces)
        for number in range(4):
            assert sorted(FolderStore(tmp_path / f"worker{number}").list_pieces()) == sorted(map(name, pieces))

    asyncio.run(run())


async def _take_all(pieces, store, expected, server, sources, folder):
    folder.mkdir()

    async def take(piece):
        part = folder / name(piece)
        await sources.piece(name(piece), len(piece), part)
        store.put(name(piece), part.read_bytes())
        expected.discard(name(piece))
        server.notify()

    await asyncio.gather(*map(take, pieces))
