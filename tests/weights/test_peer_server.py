"""What a worker serves to its peers, over real sockets."""

import asyncio

import aiohttp
import pytest
from peer_machines import KEY, get, knows_key, name, serving, until

from offbeat.coordinator.relays import key_hash
from offbeat.errors import UserError
from offbeat.weights import peer_server
from offbeat.weights.peer_server import FRESH_S, STALE_S, Guests, PeerLimits, PeerServer
from offbeat.weights.signing import SigningKey, seal


def test_a_piece_is_served_whole_and_in_ranges(store, data):
    store.put(name(data), data)

    async def run():
        async with serving(store) as server:
            url = f"{server.url}/pieces/{name(data)}"
            assert (await get(url))[:2] == (200, data)
            status, body, headers = await get(url, Range="bytes=1000-1999")
            assert (status, body) == (206, data[1000:2000])
            assert headers["Content-Range"] == f"bytes 1000-1999/{len(data)}"
            assert (await get(url, Range="bytes=299999-"))[:2] == (206, data[299_999:])
            assert (await get(url, Range="bytes=299990-400000"))[:2] == (206, data[299_990:])
            assert (await get(url, Range=f"bytes={len(data)}-"))[0] == 416
            assert (await get(url, Range="bytes=5-4"))[0] == 416
            assert (await get(url, Range="bytes=-5"))[:2] == (206, data[-5:])
            assert (await get(url, Range=f"bytes={'9' * 5000}-"))[0] == 400

    asyncio.run(run())


def test_a_manifest_is_served_by_number_and_digest(store):
    sealed = seal(b'{"number":7}', SigningKey.generate())
    digest = name(b'{"number":7}')
    store.put_manifest(7, digest, sealed)

    async def run():
        async with serving(store) as server:
            assert (await get(f"{server.url}/manifests/7/{digest}"))[:2] == (200, sealed)
            assert (await get(f"{server.url}/manifests/8/{digest}"))[0] == 404

    asyncio.run(run())


@pytest.mark.parametrize("key", ["", "another", KEY + "x", "\udcff"])
def test_nobody_is_answered_without_the_key(store, data, key):
    store.put(name(data), data)

    async def run():
        async with serving(store) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            credentials = f"Bearer {key}".encode(errors="surrogateescape")
            head = b"GET /pieces/" + name(data).encode() + b" HTTP/1.1\r\nHost: x\r\nAuthorization: " + credentials
            writer.write(head + b"\r\nConnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 401")
            assert data[:100] not in answer

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/", "/pieces", "/pieces/ab", "/pieces/../../secret", f"/pieces/{'A' * 64}", "/x"])
def test_there_is_nothing_but_pieces_and_manifests(store, path):
    async def run():
        async with serving(store) as server:
            assert (await get(server.url + path))[0] == 404

    asyncio.run(run())


def test_a_piece_that_the_disk_has_spoilt_is_not_served(store, data):
    digest = name(data)
    store.put(digest, data)
    path = store.folder / "pieces" / digest[:2] / digest
    path.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])

    async def run():
        async with serving(store) as server:
            for headers in ({}, {"Range": "bytes=0-9"}):
                status, body, _ = await get(f"{server.url}/pieces/{digest}", **headers)
                assert status == 404
                assert data[:10] not in body

    asyncio.run(run())


def test_a_piece_that_is_on_its_way_is_waited_for(store, data):
    async def run():
        digest, expected = name(data), {name(data)}
        limits = PeerLimits(check_every_s=60.0)
        async with serving(store, expects=expected.__contains__, limits=limits) as server:
            answer = asyncio.create_task(get(f"{server.url}/pieces/{digest}?wait_s=30"))
            await until(lambda: server._num_requests)
            server.notify()  # of something else
            await asyncio.sleep(0)
            store.put(digest, data)
            expected.clear()
            server.notify()
            assert (await asyncio.wait_for(answer, 20))[:2] == (200, data)

    asyncio.run(run())


def test_a_piece_is_found_even_if_nobody_tells(store, data):
    async def run():
        async with serving(store, expects=lambda digest: True) as server:
            answer = asyncio.create_task(get(f"{server.url}/pieces/{name(data)}?wait_s=30"))
            await until(lambda: server._num_requests)
            store.put(name(data), data)
            assert (await asyncio.wait_for(answer, 20))[:2] == (200, data)

    asyncio.run(run())


def test_who_waits_in_vain_is_told_whether_to_ask_again(store, data):
    async def run():
        expected = {name(data)}
        limits = PeerLimits(unexpected_wait_s=0.05)
        async with serving(store, expects=expected.__contains__, limits=limits) as server:
            url = f"{server.url}/pieces/{name(data)}"
            assert (await get(f"{url}?wait_s=0.1"))[0] == 503
            answer = asyncio.create_task(get(f"{url}?wait_s=30"))
            await until(lambda: server._num_requests)
            expected.clear()  # given up
            server.notify()
            assert (await asyncio.wait_for(answer, 20))[0] == 404
            assert (await get(f"{url}?wait_s=nan"))[0] == 400

    asyncio.run(run())


def test_a_piece_that_arrives_while_the_disk_is_read_is_asked_for_again(store, data, monkeypatch):
    """It was not there yet and is not expected any more, which is no reason to go to the root."""
    expected, size = {name(data)}, store.size

    def late(digest):
        found = size(digest)
        if expected:
            store.put(digest, data)
            expected.clear()
        return found

    monkeypatch.setattr(store, "size", late)

    async def run():
        async with serving(store, expects=expected.__contains__) as server:
            url = f"{server.url}/pieces/{name(data)}"
            assert (await get(url))[0] == 503
            assert (await get(url))[:2] == (200, data)

    asyncio.run(run())


def test_callers_are_bounded(store, data):
    async def run():
        async with serving(store, expects=lambda digest: True, limits=PeerLimits(max_requests=1)) as server:
            url = f"{server.url}/pieces/{name(data)}"
            first = asyncio.create_task(get(f"{url}?wait_s=30"))
            await until(lambda: server._num_requests)
            assert (await get(url))[0] == 429
            store.put(name(data), data)
            assert (await asyncio.wait_for(first, 20))[0] == 200

    asyncio.run(run())


def test_connections_are_bounded_and_whoever_shows_the_key_is_not_sent_away_for_another(store, data):
    async def run():
        async with serving(store, expects=lambda digest: True, limits=PeerLimits(max_connections=2)) as server:
            url = f"{server.url}/pieces/{name(data)}"
            waiting = [asyncio.create_task(get(f"{url}?wait_s=30")) for _ in range(2)]
            await until(lambda: server._num_requests == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            store.put(name(data), data)
            assert [(await asyncio.wait_for(call, 20))[0] for call in waiting] == [200, 200]

    asyncio.run(run())


def test_a_stranger_that_takes_all_connections_keeps_no_peer_out(store, data):
    store.put(name(data), data)

    async def run():
        async with serving(store, limits=PeerLimits(max_connections=3)) as server:
            strangers = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(10)]
            assert (await get(f"{server.url}/pieces/{name(data)}"))[:2] == (200, data)
            assert await asyncio.wait_for(strangers[0][0].read(), 10) == b""  # it gave way
            for _, writer in strangers:
                writer.close()

    asyncio.run(run())


def test_who_hangs_up_is_not_waited_with(store, data):
    async def run():
        async with serving(store, expects=lambda digest: True) as server:
            call = asyncio.create_task(get(f"{server.url}/pieces/{name(data)}?wait_s=30"))
            await until(lambda: server._num_requests)
            call.cancel()
            await until(lambda: not server._num_requests)

    asyncio.run(run())


def test_a_server_that_stops_sends_those_who_wait_away(store, data):
    async def run():
        async with serving(store, expects=lambda digest: True) as server:
            call = asyncio.create_task(get(f"{server.url}/pieces/{name(data)}?wait_s=30"))
            await until(lambda: server._num_requests)
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(call, 20)

    asyncio.run(run())


def test_a_connection_on_which_nobody_proves_who_it_is_is_closed(store):
    async def run():
        async with serving(store, limits=PeerLimits(silence_s=0.1)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /pieces")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()

    asyncio.run(run())


def test_a_caller_that_does_not_read_is_dropped(store):
    data = bytes(32 * 1024 * 1024)
    digest = name(data)  # which may take longer than a connection may be silent
    store.put(digest, data)

    async def run():
        async with serving(store, limits=PeerLimits(silence_s=0.2)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
            reader._transport.pause_reading()
            writer.write(f"GET /pieces/{digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
            await until(lambda: server._num_requests)
            await until(lambda: not server._num_requests)
            assert server.num_sent_bytes < len(data)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_other_machines_are_not_listened_to_unless_we_are_told(store, host):
    with pytest.raises(UserError, match=rf"^--peer-address {host}: keys .* in the clear; add --allow-plain"):
        PeerServer(store, knows_key, host=host)
    PeerServer(store, knows_key, host=host, beyond_loopback=True)


def test_a_taken_port_is_refused(store):
    async def run():
        async with serving(store) as server:
            with pytest.raises(UserError, match=f"port {server.port}.*choose another"):
                await PeerServer(store, knows_key, port=server.port).start()

    asyncio.run(run())


class Coordinator:
    """Who may fetch, and how often it was asked."""

    def __init__(self, *keys):
        self.keys, self.num_asked, self.is_away = set(keys), 0, False

    async def __call__(self):
        self.num_asked += 1
        if self.is_away:
            raise OSError("nobody there")
        return [key_hash(key) for key in self.keys]


def test_a_worker_that_left_can_fetch_no_more_and_a_newcomer_can(store, data, monkeypatch):
    monkeypatch.setattr(peer_server, "ASK_EVERY_S", 0.0)
    store.put(name(data), data)
    now_s, coordinator = 100.0, Coordinator("first", "second")

    async def run():
        nonlocal now_s
        guests = Guests(coordinator, lambda: now_s)
        async with serving(store, admits=guests.admits) as server:

            async def status(key):
                nonlocal now_s
                now_s += 0.001
                return (await get(f"{server.url}/pieces/{name(data)}", key))[0]

            assert [await status(key) for key in ("first", "second", "newcomer")] == [200, 200, 401]
            coordinator.keys = {"second", "newcomer"}
            now_s += FRESH_S
            assert [await status(key) for key in ("first", "second", "newcomer")] == [401, 200, 200]

    asyncio.run(run())


def test_a_newcomer_is_admitted_without_waiting_for_the_next_look():
    coordinator = Coordinator("old")
    now_s = 100.0

    async def run():
        nonlocal now_s
        guests = Guests(coordinator, lambda: now_s)
        assert await guests.admits("old")
        coordinator.keys.add("new")
        now_s += 2.0
        assert await guests.admits("new")
        assert coordinator.num_asked == 2
        assert all([await guests.admits(key) for key in ("old", "new") * 50])
        assert coordinator.num_asked == 2, "keys that are known cost nothing"

    asyncio.run(run())


def test_strangers_do_not_make_us_ask_for_each_of_them(monkeypatch):
    monkeypatch.setattr(peer_server, "ASK_EVERY_S", 0.2)
    coordinator = Coordinator("ours")

    async def run():
        guests = Guests(coordinator)
        tried = await asyncio.gather(*(guests.admits(f"guess {number}") for number in range(500)))
        assert not any(tried)
        assert coordinator.num_asked <= 2

    asyncio.run(run())


def test_while_the_coordinator_is_away_those_it_named_are_served_for_a_while():
    coordinator = Coordinator("ours")
    now_s = 100.0

    async def run():
        nonlocal now_s
        guests = Guests(coordinator, lambda: now_s)
        assert await guests.admits("ours")
        coordinator.is_away = True
        now_s += STALE_S - 1.0
        assert await guests.admits("ours")
        assert not await guests.admits("another")
        now_s += 2.0
        assert not await guests.admits("ours")

    asyncio.run(run())


def test_nobody_is_admitted_before_the_coordinator_has_spoken():
    async def run():
        coordinator = Coordinator("ours")
        coordinator.is_away = True
        assert not await Guests(coordinator).admits("ours")
        assert not await Guests(Coordinator()).admits("")

    asyncio.run(run())
