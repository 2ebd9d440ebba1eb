"""Versions in pieces over a real socket: what a trainer elsewhere may send, and what a worker elsewhere gets."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
import torch
from blake3 import blake3
from http_run import SOON_S, WEIGHTS, LiveRun, answer
from msgspec import structs
from safetensors.torch import load

from offbeat.client import wire
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteTrainer, RemoteWorker
from offbeat.client.weight_transfer import CoordinatorReceiver, fill, send_version
from offbeat.config import from_dict
from offbeat.coordinator.relays import key_hash
from offbeat.errors import OffbeatError
from offbeat.launch.joining import JoinedRun
from offbeat.launch.worker_role import Site, receiving
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, WorkerState
from offbeat.tools.export import read
from offbeat.weights import peer_server
from offbeat.weights.manifest import Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey, open_sealed, seal
from offbeat.weights.version import Adapter, weights_digest

OCTETS = {"Content-Type": wire.OCTETS}


class Away:
    """A trainer on another machine: a disk and a key of its own."""

    def __init__(self, folder, adapter=None):
        self.key, self.store = SigningKey.generate(), FolderStore(folder / "weights")
        self.publisher = Publisher(folder / "weights", self.store, self.key, adapter=adapter)
        self.tensors = load(WEIGHTS)

    def write(self, number, step, parent):
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.tensors["w"][:step] += 1.0
        return self.publisher.write(number, step, parent, self.tensors)

    def sealed(self, version):
        return self.store.get_manifest(version.number, version.manifest)

    def manifest(self, version):
        return Manifest.decode(open_sealed(self.sealed(version), [self.key.public]))


@asynccontextmanager
async def connected(run, secret):
    connection = Connection(run.server.url, secret)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def run(tmp_path):
    with LiveRun(tmp_path / "run", batch={"groups_per_step": 1, "group_size": 2}) as live:
        yield live


@pytest.fixture
def trainer(run):
    return run.secret("trainer", Role.TRAINER)


@pytest.fixture
def away(tmp_path):
    return Away(tmp_path / "trainer")


def introduced(run, trainer, key):
    assert run.post("/v1/introduce", wire.IntroduceCall(key=key.public), trainer).status == 204


def put(run, secret, path, data):
    return run.send("PUT", path, data, {**OCTETS, wire.CONTENT_DIGEST: wire.content_digest(data)}, secret)


def put_pieces(run, trainer, away, version):
    for piece in away.manifest(version).pieces:
        assert put(run, trainer, f"/v1/pieces/{piece.digest}", away.store.get(piece.digest)).status == 201


def put_manifest(run, trainer, version, sealed):
    return put(run, trainer, f"/v1/manifests/{version.number}/{version.manifest}", sealed)


async def train_a_step(worker, trainer, away, step, parent):
    """From leases to the version that came of it; the worker has `parent`."""
    lease = await worker.lease(2, parent.number, SOON_S)
    for task in lease.tasks:
        await worker.submit(answer(task, parent.number), task.fence)
    await trainer.claim(step, SOON_S)
    version = await asyncio.to_thread(away.write, await trainer.next_version(), step + 1, parent.number)
    await trainer.commit(step, version)
    return version


def test_versions_travel_from_a_trainer_elsewhere_to_a_worker_elsewhere_as_what_changed(
    run, trainer, worker, away, tmp_path
):
    figures = []

    async def scenario():
        async with connected(run, trainer) as ours, connected(run, worker) as theirs:
            remote = RemoteTrainer(ours, store=away.store, signer=away.key.public)
            await remote.reconcile(0, 0)
            receiver = CoordinatorReceiver(theirs, tmp_path / "worker", report=figures.append)
            client = RemoteWorker(theirs, tmp_path / "worker", receiver=receiver)
            version = away.write(await remote.next_version(), 0, 0)
            await remote.publish(version)
            await remote.publish(version)  # told twice
            for step in range(3):
                newest = await client.newer(None, SOON_S)
                assert (newest.number, newest.manifest) == (version.number, version.manifest)
                here = await client.fetch(newest)
                assert torch.equal(read(here)["w"], away.tensors["w"])
                version = await train_a_step(client, remote, away, step, version)
            late = RemoteWorker(theirs, tmp_path / "late")
            assert torch.equal(read(await late.fetch(version))["w"], away.tensors["w"])

    asyncio.run(scenario())
    first, *others = (sum(figure.num_bytes.values()) for figure in figures)
    assert first > 2_000_000
    assert all(num_bytes < 20_000 for num_bytes in others), others
    assert [kind for figure in figures for kind in figure.num_bytes] == ["full", "delta", "delta"]


def test_a_piece_is_taken_once_it_is_what_its_name_says(run, trainer, away):
    data = b"a piece"
    digest = blake3(data).hexdigest()
    asked = wire.MissingCall(pieces=[digest])
    assert run.post("/v1/pieces/missing", asked, trainer).record(wire.Missing).pieces == [digest]
    response = put(run, trainer, f"/v1/pieces/{digest}", b"another piece")
    assert (response.status, "damaged on the way" in response.error) == (400, True)
    assert put(run, trainer, f"/v1/pieces/{digest}", data).status == 201
    assert put(run, trainer, f"/v1/pieces/{digest}", data).status == 201
    assert run.post("/v1/pieces/missing", asked, trainer).record(wire.Missing).pieces == []
    assert put(run, trainer, "/v1/pieces/..%2f..%2fledger.sqlite", data).status == 404
    response = run.send("PUT", f"/v1/pieces/{digest}", data, {"Content-Type": "text/plain"}, trainer)
    assert response.status == 415
    response = run.send("PUT", f"/v1/pieces/{digest}", b"", {**OCTETS, "Content-Length": str(2**30)}, trainer)
    assert response.status == 413


def test_a_piece_is_handed_out_whole_and_in_parts(run, trainer, worker):
    data = bytes(range(256)) * 1000
    digest = blake3(data).hexdigest()
    put(run, trainer, f"/v1/pieces/{digest}", data)
    assert run.send("GET", f"/v1/pieces/{digest}", secret=worker).body == data
    part = run.send("GET", f"/v1/pieces/{digest}", headers={"Range": "bytes=1000-"}, secret=worker)
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, data[1000:], "bytes 1000-255999/256000")
    assert run.send("GET", f"/v1/pieces/{digest}", headers={"Range": "bytes=256000-"}, secret=worker).status == 416
    long = {"Range": f"bytes={'9' * 5000}-"}
    assert run.send("GET", f"/v1/pieces/{digest}", headers=long, secret=worker).status == 400
    assert run.send("GET", f"/v1/pieces/{'0' * 64}", secret=worker).status == 404
    assert run.send("GET", "/v1/pieces/x", secret=worker).status == 404


def test_a_download_goes_on_after_what_is_there_already(run, trainer, worker, tmp_path):
    data, part = bytes(range(256)) * 1000, tmp_path / "part"
    digest = blake3(data).hexdigest()
    put(run, trainer, f"/v1/pieces/{digest}", data)

    async def scenario(had: bytes) -> bytes:
        part.write_bytes(had)
        async with connected(run, worker) as theirs:
            await asyncio.wait_for(fill(theirs, f"/v1/pieces/{digest}", part, len(data)), 20)
        return part.read_bytes()

    assert asyncio.run(scenario(b"")) == data
    assert asyncio.run(scenario(b"!" * 1000)) == b"!" * 1000 + data[1000:], "only the rest came"
    assert asyncio.run(scenario(data + b"more")) == data


def test_a_manifest_counts_once_a_trainer_of_the_run_has_signed_it_and_its_pieces_are_here(run, trainer, away):
    version = away.write(1, 0, 0)
    response = put_manifest(run, trainer, version, away.sealed(version))
    assert (response.status, "not trusted" in response.error) == (400, True)
    introduced(run, trainer, away.key)
    response = put_manifest(run, trainer, version, away.sealed(version))
    assert (response.status, "never sent" in response.error) == (422, True)
    put_pieces(run, trainer, away, version)
    changed = away.sealed(version).replace(b'"step":0', b'"step":1')
    assert put_manifest(run, trainer, version, changed).status == 400
    assert put_manifest(run, trainer, replace(version, number=2), away.sealed(version)).status == 400
    assert put_manifest(run, trainer, version, away.sealed(version)).status == 201
    assert put_manifest(run, trainer, version, away.sealed(version)).status == 201


def test_an_adapter_counts_once_what_it_stands_on_is_here(run, trainer, worker, tmp_path):
    base = {"base": torch.randn(64, 64)}
    away = Away(tmp_path / "trainer", Adapter(weights_digest(base), "{}", lambda: base))
    introduced(run, trainer, away.key)
    version = away.write(1, 0, 0)
    put_pieces(run, trainer, away, version)
    response = put_manifest(run, trainer, version, away.sealed(version))
    assert (response.status, "the base manifest of version" in response.error) == (422, True)

    async def send() -> None:
        async with connected(run, trainer) as ours:
            await send_version(ours, away.store, version.number, version.manifest, away.key.public)

    asyncio.run(send())
    assert put_manifest(run, trainer, version, away.sealed(version)).status == 201
    there = FolderStore(run.weights.folder)
    assert set(there.list_manifests()) >= set(away.store.list_manifests())
    assert set(there.list_pieces()) >= set(away.store.list_pieces())


def test_no_version_is_published_without_its_manifest_and_pieces(run, trainer, away):
    introduced(run, trainer, away.key)
    version = away.write(1, 0, 0)
    call = wire.PublishCall(version=version)
    response = run.post("/v1/publish", call, trainer)
    assert (response.status, "its manifest is missing or damaged" in response.error) == (422, True)
    put_pieces(run, trainer, away, version)
    assert put_manifest(run, trainer, version, away.sealed(version)).status == 201
    other = wire.PublishCall(version=replace(version, digest="0" * 64))
    assert "differs from its manifest in step, parent or digest" in run.post("/v1/publish", other, trainer).error
    store = FolderStore(run.weights.folder)
    gone = away.manifest(version).pieces[0].digest
    store.delete([gone], [])
    assert "never sent" in run.post("/v1/publish", call, trainer).error
    put_pieces(run, trainer, away, version)
    assert run.post("/v1/publish", call, trainer).status == 204


def test_of_two_trainers_that_publish_one_number_the_second_hears_of_a_conflict(run, trainer, away, tmp_path):
    other, its_secret = Away(tmp_path / "other"), run.secret("other", Role.TRAINER)
    other.tensors["w"] += 1.0
    statuses = []
    for who, secret in ((away, trainer), (other, its_secret)):
        introduced(run, secret, who.key)
        version = who.write(1, 0, 0)
        put_pieces(run, secret, who, version)
        statuses.append(put_manifest(run, secret, version, who.sealed(version)).status)
        statuses.append(run.post("/v1/publish", wire.PublishCall(version=version), secret).status)
        if who is away:
            published = version
    assert statuses == [201, 204, 409, 422]
    assert run.ledger.latest_version().manifest == published.manifest


def test_what_a_revoked_trainer_signed_is_believed_no_more(run, trainer, worker, away):
    introduced(run, trainer, away.key)
    assert run.send("GET", "/v1/signers", secret=worker).record(wire.Signers).keys == [away.key.public]
    run.ask(run.coordinator.call(run.coordinator.ledger.move_worker, "trainer", WorkerState.REVOKED, "lost"))
    assert run.send("GET", "/v1/signers", secret=worker).record(wire.Signers).keys == []


def test_a_worker_refuses_what_another_key_has_signed_and_an_older_manifest_in_its_place(
    run, trainer, worker, away, tmp_path
):
    introduced(run, trainer, away.key)
    version = away.write(1, 0, 0)
    put_pieces(run, trainer, away, version)
    put_manifest(run, trainer, version, away.sealed(version))
    run.post("/v1/publish", wire.PublishCall(version=version), trainer)
    on_disk = run.weights.folder / "manifests" / f"{version.number:08d}-{version.manifest}.json"
    older = structs.replace(away.manifest(version), number=0, parent=None)
    for name, content in {
        "forged": seal(away.manifest(version).encode(), SigningKey.generate()),
        "replayed": seal(older.encode(), away.key),
    }.items():
        on_disk.write_bytes(content)

        async def scenario(name=name):
            async with connected(run, worker) as theirs:
                return await RemoteWorker(theirs, tmp_path / name).fetch(version)

        with pytest.raises(OffbeatError, match="version 1"):
            asyncio.run(scenario())


def test_workers_of_one_site_are_told_to_ask_each_other(run):
    first, second, away = (run.secret(name) for name in ("first", "second", "away"))

    def sources(secret, site, port=0):
        response = run.post("/v1/sources", wire.SourcesCall(site=site, port=port), secret)
        return response.record(wire.SourceList)

    assert sources(first, "home", 7000).peers == []
    (peer,) = sources(second, "home").peers
    assert (peer.host, peer.port) == ("127.0.0.1", 7000)
    assert sources(away, "elsewhere").peers == []
    assert sources(first, "home", 7000).guests == [key_hash(peer.key)]
    assert peer.key not in repr(sources(second, "home"))


@pytest.mark.parametrize(
    "call",
    [
        {"url": "http://127.0.0.1:9/x?"},
        {"host": "10.0.0.1", "port": 80},
        {"host": "127.0.0.1/x?", "port": 80},
        {"host": "localhost", "port": 80},
        {"port": 70000},
        {"port": -1},
    ],
)
def test_no_worker_can_send_the_others_of_its_site_elsewhere(run, call):
    first, second = run.secret("first"), run.secret("second")
    assert run.post("/v1/sources", {"site": "home", **call}, first).status in (400, 422)
    answer = run.post("/v1/sources", wire.SourcesCall(site="home"), second)
    assert answer.record(wire.SourceList).peers == []


def test_the_keys_of_a_worker_end_when_it_is_set_aside(run):
    """Also when another process revokes it, as `offbeat worker revoke` does."""
    secrets = {name: run.secret(name) for name in ("server", "stays", "revoked", "quarantined", "left")}

    def sources(name, port=0):
        return run.post("/v1/sources", wire.SourcesCall(site="home", port=port), secrets[name]).record(wire.SourceList)

    sources("server", 7000)
    hashes = {name: key_hash(sources(name).peers[0].key) for name in secrets if name != "server"}
    assert set(sources("server", 7000).guests) == set(hashes.values())
    with Ledger(run.folder / "ledger.sqlite") as beside:
        beside.move_worker("revoked", WorkerState.REVOKED)
        beside.move_worker("quarantined", WorkerState.QUARANTINED)
    assert run.post("/v1/leave", wire.Nothing(), secrets["left"]).status == 204
    assert sources("server", 7000).guests == [hashes["stays"]]


def test_nothing_that_opens_a_peers_door_is_in_the_ledger(run):
    first, second = run.secret("first"), run.secret("second")
    run.post("/v1/sources", wire.SourcesCall(site="home", port=7000), first)
    answer = run.post("/v1/sources", wire.SourcesCall(site="home"), second)
    (peer,) = answer.record(wire.SourceList).peers
    files = [file for file in run.folder.iterdir() if file.name.startswith("ledger.sqlite")]
    assert files
    assert not [file for file in files if peer.key.encode() in file.read_bytes()]
    assert run.ledger.execute("SELECT COUNT(*) FROM meta WHERE key LIKE '%peer%'").fetchone() == (0,)


def test_one_worker_of_a_site_hands_a_version_on_to_another_until_that_is_set_aside(run, trainer, away, tmp_path):
    """As `offbeat worker --site` has it, over real sockets: with addresses and keys that the coordinator tells."""
    introduced(run, trainer, away.key)
    version = away.write(1, 0, 0)
    put_pieces(run, trainer, away, version)
    put_manifest(run, trainer, version, away.sealed(version))
    assert run.post("/v1/publish", wire.PublishCall(version=version), trainer).status == 204
    near, far = run.secret("near"), run.secret("far")

    def brought(connection, name, address=None):
        member = JoinedRun(connection, name, "live", from_dict({}))
        return receiving(member, tmp_path / name, Site("home", address), lambda figures: None, lambda digest: False)

    async def scenario():
        async with (
            connected(run, near) as one,
            connected(run, far) as other,
            brought(one, "near", ("127.0.0.1", 0)) as first,
            brought(other, "far") as second,
        ):
            await first.fetch(version)
            (peer,) = (await second.coordinator.peers("home", "", 0, None)).peers
            url = f"http://{peer.host}:{peer.port}/pieces/{away.manifest(version).pieces[0].digest}"
            before = num_sent_by_the_root(run)
            assert torch.equal(read(await second.fetch(version))["w"], away.tensors["w"])
            assert num_sent_by_the_root(run) == before > 0
            assert await status_of(url, peer.key) == 200
            with Ledger(run.folder / "ledger.sqlite") as beside:
                beside.move_worker("far", WorkerState.REVOKED)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(peer_server, "FRESH_S", 0.0)  # as if a while had passed
                assert await status_of(url, peer.key) == 401

    asyncio.run(scenario())


def num_sent_by_the_root(run):
    found = re.search(r'route="/v1/pieces/{digest}",status="200"} (\d+)', run.send("GET", "/metrics").body.decode())
    return int(found[1])


async def status_of(url, key):
    held = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=held) as response:
        return response.status


@pytest.mark.parametrize("key", ["", "x" * 64, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_what_is_no_key_signs_nothing(run, trainer, key):
    assert run.post("/v1/introduce", wire.IntroduceCall(key=key), trainer).status == 400
    assert run.ledger.signers() == []


@pytest.mark.parametrize("path", ["/v1/introduce", "/v1/pieces/missing"])
def test_only_trainers_bring_weights(run, worker, path):
    digest = "0" * 64
    call = wire.IntroduceCall(key=digest) if path == "/v1/introduce" else wire.MissingCall(pieces=[digest])
    assert run.post(path, call, worker).status == 403
    assert put(run, worker, f"/v1/pieces/{digest}", b"x").status == 403
    assert put(run, worker, f"/v1/manifests/1/{digest}", b"x").status == 403
