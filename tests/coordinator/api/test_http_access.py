"""Who is let in: tokens, secrets, roles, quarantine and rates."""

import subprocess
import sys
import time

import pytest
from http_run import LiveRun, answer

from benchmarks.common.supervised import until
from offbeat.client import wire
from offbeat.coordinator.api import access
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.ledger.workers import Role, WorkerState, new_secret, secret_hash

WORKER_CALLS = {
    "/v1/lease": wire.LeaseCall(capacity=1, have_version=0, wait_s=0.0),
    "/v1/heartbeat": wire.HeartbeatCall(held=[]),
    "/v1/fail": wire.FailCall(task=1, fence=1, reason="none"),
    "/v1/newer": wire.NewerCall(have_version=0, wait_s=0.0),
    "/v1/round-over": wire.RoundOverCall(number=0, wait_s=0.0),
    "/v1/give-back": wire.GiveBackCall(leases=[]),
}
TRAINER_CALLS = {
    "/v1/claim": wire.ClaimCall(step=0, wait_s=0.0),
    "/v1/reconcile": wire.ReconcileCall(step=0, version=None),
    "/v1/next-version": wire.Nothing(),
    "/v1/checkpointed": wire.CheckpointedCall(step=0),
    "/v1/report": wire.ReportCall(row={}),
}
ALL_CALLS = {**WORKER_CALLS, **TRAINER_CALLS, "/v1/leave": wire.Nothing()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One where strangers may try as often as these tests do."""
    with LiveRun(tmp_path_factory.mktemp("run"), settings=ServerSettings(joins_per_s=1000.0)) as live:
        yield live


def join(run, token, name="box", secret=None):
    hashed = secret_hash(secret or new_secret())
    return run.post("/v1/join", wire.Join(name=name, secret_hash=hashed), token)


def test_a_token_is_exchanged_for_a_name_and_the_configuration(run):
    secret = new_secret()
    response = join(run, run.token(Role.TRAINER), "trainer", secret)
    welcome = response.record(wire.Welcome)
    assert response.status == 201
    assert (welcome.worker, welcome.role, welcome.run) == ("trainer", Role.TRAINER, "live")
    assert welcome.config == {"run": {"name": "live"}}
    assert run.post("/v1/next-version", wire.Nothing(), secret).status == 200


def test_a_token_used_again_is_401_and_makes_nobody(run, unchanged):
    token = run.token()
    assert join(run, token).status == 201
    before = len(run.ledger.list_workers())
    for _ in range(3):
        response = join(run, token, "again")
        assert (response.status, "already used" in response.error) == (401, True)
        assert "offbeat worker token" in response.error
    assert len(run.ledger.list_workers()) == before


def test_a_join_whose_answer_was_lost_is_made_again_by_the_same_worker(run):
    token, secret = run.token(), new_secret()
    first, again = join(run, token, "lost", secret), join(run, token, "lost", secret)
    assert (first.status, again.status) == (201, 201)
    assert first.record(wire.Welcome) == again.record(wire.Welcome)
    assert [w.name for w in run.ledger.list_workers() if w.name.startswith("lost")] == ["lost"]
    assert join(run, token, "thief").status == 401


@pytest.mark.parametrize("token", ["", "x", "y" * 43, "\u00e9" * 43])
def test_a_forged_token_is_401(run, token, unchanged):
    before = len(run.ledger.list_workers())
    assert join(run, token).status == 401
    assert len(run.ledger.list_workers()) == before


def test_a_token_that_is_too_long_is_401(run, unchanged):
    assert join(run, "z" * 1000).status == 401


def test_nothing_of_a_strangers_body_is_looked_at(run, unchanged):
    """Neither what it is, nor how large it says it will be, nor whether it ever comes."""
    bomb = wire.compress(wire.encode({"capabilities": {str(i): [] for i in range(10_000)}}))
    for secret in ("", "x", "y" * 43):
        for body in (bomb, b"no msgpack"):
            for changes in ({}, {"Content-Encoding": "zstd"}, {"Content-Type": "text/plain"}):
                assert run.post_bytes("/v1/join", body, secret, **changes).status == 401
        with run.connect() as line:
            head = (
                f"POST /v1/join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Length: 9999\r\n\r\n"
            )
            line.sendall(head.encode())
            assert line.recv(12) == b"HTTP/1.1 401"


def test_a_join_is_small_once_decompressed_too(run, unchanged):
    """Whoever has a token may be a stranger's victim: 700 bytes that become gigabytes are refused as they are."""
    token = run.token()
    huge = wire.encode({"name": "box", "secret_hash": bytes(32), "capabilities": {"x": [[]] * 2**22}})
    body = wire.compress(huge)
    assert len(body) < 1000
    response = run.post_bytes("/v1/join", body, token, **{"Content-Encoding": "zstd"})
    assert (response.status, "after decompression" in response.error) == (413, True)
    assert run.post_bytes("/v1/join", huge, token).status == 413
    assert join(run, token).status == 201


def test_a_token_is_still_good_after_a_bad_name(run):
    token = run.token()
    response = join(run, token, "../../etc")
    assert (response.status, "worker name" in response.error) == (422, True)
    assert join(run, token, "good").status == 201


@pytest.mark.parametrize("path", ALL_CALLS)
def test_without_a_secret_every_call_is_401(run, path, unchanged):
    response = run.post(path, ALL_CALLS[path])
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer nobody", "Basic abc", "Bearer " + "a" * 5000, "Bearer \xe9\xff"]
)
def test_a_secret_that_is_nobodys_is_401(run, header, unchanged):
    body = wire.encode(WORKER_CALLS["/v1/lease"])
    response = run.post_bytes("/v1/lease", body, Authorization=header)
    assert response.status == 401


def test_a_join_token_is_no_secret(run, unchanged):
    assert run.post("/v1/lease", WORKER_CALLS["/v1/lease"], run.token()).status == 401


def test_the_hash_of_a_secret_is_no_secret(run, worker, unchanged):
    (hashed,) = run.ledger.execute("SELECT secret_hash FROM workers ORDER BY joined_at DESC").fetchone()
    assert run.post("/v1/lease", WORKER_CALLS["/v1/lease"], hashed.hex()).status == 401


def test_a_worker_revoked_by_another_process_is_401_at_its_next_call_and_loses_its_tasks(run, worker, task):
    (name,) = [w.name for w in run.ledger.list_workers() if w.num_leased][-1:]
    assert run.post("/v1/heartbeat", wire.HeartbeatCall(held=[(task.id, task.fence)]), worker).status == 200
    command = "from pathlib import Path; from offbeat.cli.access import revoke; import sys; "
    command += "revoke(Path(sys.argv[1]), sys.argv[2], 'its box was stolen')"
    subprocess.run([sys.executable, "-c", command, run.folder, name], check=True)
    for path in ALL_CALLS:
        response = run.post(path, ALL_CALLS[path], worker)
        assert (response.status, "its box was stolen" in response.error) == (401, True)
    assert run.submit(answer(task), task.fence, worker).status == 401
    assert run.send("GET", "/v1/weights/0", secret=worker).status == 401
    until(lambda: not {w.name: w.num_leased for w in run.ledger.list_workers()}[name], "its tasks to be free")
    assert run.ledger.verify().violations == ()


def test_a_quarantined_worker_is_403_and_cannot_leave_its_way_out(run, unchanged):
    secret = run.secret("liar")
    ledger = run.coordinator.ledger
    run.ask(run.coordinator.call(ledger.move_worker, "liar", WorkerState.QUARANTINED, "its log-probs were invented"))
    for path in ALL_CALLS:
        response = run.post(path, ALL_CALLS[path], secret)
        assert (response.status, "invented" in response.error) == (403, True)


@pytest.mark.parametrize("path", TRAINER_CALLS)
def test_a_worker_may_not_make_the_trainers_calls(run, worker, path, unchanged):
    assert run.post(path, TRAINER_CALLS[path], worker).status == 403


def test_a_worker_may_not_write_weights(run, worker, unchanged):
    headers = {"Content-Type": wire.OCTETS, wire.CONTENT_DIGEST: wire.content_digest(b"w")}
    assert run.send("PUT", f"/v1/pieces/{wire.blake3(b'w').hexdigest()}", b"w", headers, worker).status == 403


@pytest.mark.parametrize("role", [Role.TRAINER, Role.REWARD])
@pytest.mark.parametrize("path", WORKER_CALLS)
def test_only_rollout_workers_may_take_tasks(run, role, path, unchanged):
    assert run.post(path, WORKER_CALLS[path], run.secret("other", role)).status == 403


def test_a_trainer_may_not_submit(run, task, unchanged):
    assert run.submit(answer(task), task.fence, run.secret("t", Role.TRAINER)).status == 403


def test_a_worker_that_left_comes_back_under_its_name(run):
    secret = run.secret("commuter")
    assert run.post("/v1/leave", wire.Nothing(), secret).status == 204
    assert state_of(run, "commuter") is WorkerState.LEFT
    run.lease(secret, wait_s=0.0)
    assert state_of(run, "commuter") is WorkerState.ACTIVE


def state_of(run, name):
    return {worker.name: worker.state for worker in run.ledger.list_workers()}[name]


def test_a_worker_that_leaves_gives_its_tasks_back(run):
    secret = run.secret("brief")
    assert run.lease(secret, capacity=2)
    run.post("/v1/leave", wire.Nothing(), secret)
    assert "brief" not in run.ledger.num_leased()
    assert run.ledger.verify().violations == ()


def test_who_calls_too_often_is_429_and_told_when_to_come_back(tmp_path):
    with LiveRun(tmp_path, settings=ServerSettings(requests_per_s=0.001, request_burst=3)) as run:
        busy, other = run.secret("busy"), run.secret("other")
        call = wire.HeartbeatCall(held=[])
        assert [run.post("/v1/heartbeat", call, busy).status for _ in range(3)] == [200] * 3
        before = run.content()
        response = run.post("/v1/heartbeat", call, busy)
        assert response.status == 429
        assert 900 <= int(response.headers["Retry-After"]) <= 1001
        assert run.post("/v1/heartbeat", call, other).status == 200
        assert run.content() == before


def test_strangers_may_try_few_tokens(tmp_path):
    with LiveRun(tmp_path, settings=ServerSettings(joins_per_s=0.001)) as run:
        token = run.token()
        assert join(run, "guess").status == 401
        response = join(run, token)
        assert (response.status, int(response.headers["Retry-After"]) > 900) == (429, True)
        assert run.ledger.list_workers() == []
        assert run.post("/v1/heartbeat", wire.HeartbeatCall(held=[]), run.secret()).status == 200


def test_metrics_are_for_this_machine_and_those_who_joined(run, worker):
    assert join(run, run.token()).status == 201
    response = run.send("GET", "/metrics")
    assert response.status == 200
    text = response.body.decode()
    assert 'offbeat_requests_total{route="/v1/join",status="201"}' in text
    assert "offbeat_max_staleness_trained 0" in text
    assert run.send("GET", "/metrics", secret=worker).status == 200


def test_no_more_members_are_remembered_than_there_is_room_for(run, monkeypatch):
    monkeypatch.setattr(access, "MAX_KNOWN", 2)
    admission = access.Access(run.ledger, ServerSettings(), time.monotonic, {})
    for number in range(4):
        assert admission._worker_of(run.secret(f"member-{number}")).name == f"member-{number}"
    assert len(admission._known) == 2
