"""Where the server listens, when it answers, and how it stops."""

import socket
import threading
import time

import pytest
from http_run import SOON_S, LiveRun

from offbeat.client import wire
from offbeat.client.protocol import LeaseResponse
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.coordinator.api.server import Address
from offbeat.errors import UserError

LONG_LEASE = wire.LeaseCall(capacity=1, have_version=99, wait_s=30.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "10.0.0.1"])
def test_other_machines_are_not_served_without_tls(host):
    with pytest.raises(UserError, match=r"serve.host = .*TLS.*serve.certificate.*behind_proxy"):
        Address(host=host).check()
    Address(host=host, behind_proxy=True).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.53"])
def test_this_machine_is_served_without_tls(host):
    Address(host=host).check()


def test_a_certificate_needs_its_key(tmp_path):
    with pytest.raises(UserError, match="both or neither"):
        Address(certificate=tmp_path / "c.pem").check()


def test_a_certificate_that_does_not_work_is_told_before_anything_listens(tmp_path):
    (tmp_path / "c.pem").write_text("no certificate")
    (tmp_path / "k.pem").write_text("no key")
    with pytest.raises(UserError, match=r"c\.pem"):
        Address(certificate=tmp_path / "c.pem", key=tmp_path / "k.pem").check()
    with pytest.raises(UserError, match="no such file"):
        Address(certificate=tmp_path / "absent.pem", key=tmp_path / "k.pem").check()


def test_a_port_in_use_is_told_in_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = LiveRun(tmp_path, address=Address(port=taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"serve.port = \d+: cannot listen there: Address already in use"), run:
            pass


def test_until_it_is_open_everyone_is_asked_to_come_back(tmp_path):
    with LiveRun(tmp_path, opened=False) as run:
        secret, before = run.secret(), run.content()
        for response in (
            run.send("GET", "/healthz"),
            run.send("GET", "/metrics"),
            run.post("/v1/lease", LONG_LEASE, secret),
            run.post("/v1/join", wire.Join(name="w", secret_hash=bytes(32)), run.token()),
        ):
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert response.error == "the coordinator is starting; try again in a moment"
        assert run.content() == before
        run.server.open()
        assert run.send("GET", "/healthz").status == 200


def test_stopping_sends_waiting_callers_away(tmp_path):
    with LiveRun(tmp_path) as run:
        secret, answers = run.secret(), []
        run.lease(secret, capacity=1000)  # so that nothing is left
        waiting = threading.Thread(
            target=lambda: answers.append(
                run.post("/v1/lease", wire.LeaseCall(capacity=1, have_version=0, wait_s=30.0), secret)
            )
        )
        waiting.start()
        wait_until(lambda: len(run.server._uvicorn.server_state.tasks) == 1)
        run.ask(run.server.stop())
        waiting.join()
        assert (answers[0].status, answers[0].headers["Retry-After"]) == (503, "1")
        with pytest.raises(OSError, match="refused"):
            run.connect()


def test_stopping_twice_is_stopping_once(tmp_path):
    with LiveRun(tmp_path) as run:
        run.ask(run.server.stop())
        run.ask(run.server.stop())


def test_stopping_hangs_up_on_those_who_send_nothing(tmp_path):
    with LiveRun(tmp_path) as run, run.connect() as line:
        wait_until(lambda: run.server._uvicorn.server_state.connections)
        run.ask(run.server.stop())
        assert line.recv(1000) == b""


def test_a_caller_that_goes_away_while_it_waits_is_given_nothing(tmp_path):
    with LiveRun(tmp_path, settings=ServerSettings(max_wait_s=10 * SOON_S)) as run:
        holder, gone = run.secret("holder"), run.secret("gone")
        tasks = run.lease(holder, capacity=1000)
        call = wire.encode(wire.LeaseCall(capacity=1, have_version=0, wait_s=10 * SOON_S))
        head = (
            f"POST /v1/lease HTTP/1.1\r\nHost: x\r\nContent-Type: {wire.MSGPACK}\r\n"
            f"Authorization: Bearer {gone}\r\nContent-Length: {len(call)}\r\n"
            f"{wire.CONTENT_DIGEST}: {wire.content_digest(call)}\r\n\r\n"
        )
        with run.connect() as line:
            line.sendall(head.encode() + call)
            wait_until(lambda: len(run.server._uvicorn.server_state.tasks) == 1)
        wait_until(lambda: not run.server._uvicorn.server_state.tasks)
        run.post("/v1/leave", wire.Nothing(), holder)
        assert run.ledger.num_leased() == {}
        assert len(run.lease(run.secret("next"), capacity=1000)) == len(tasks)


def test_signals_stay_their_owners(tmp_path):
    import signal

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with LiveRun(tmp_path):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_waiting_calls_end_when_their_time_is_over(tmp_path):
    with LiveRun(tmp_path) as run:
        secret = run.secret()
        run.lease(secret, capacity=1000)
        response = run.post("/v1/lease", wire.LeaseCall(capacity=1, have_version=0, wait_s=0.05), secret)
        assert (response.status, response.record(LeaseResponse).tasks) == (200, ())


def test_a_bug_in_one_call_is_500_without_details(tmp_path):
    with LiveRun(tmp_path) as run:
        secret = run.secret()

        async def broken(*_):
            raise RuntimeError("the secret plans of the coordinator")

        run.coordinator.heartbeat = broken
        response = run.post("/v1/heartbeat", wire.HeartbeatCall(held=[]), secret)
        assert response.status == 500
        assert b"plans" not in response.body
        assert run.send("GET", "/healthz").status == 200


def wait_until(condition) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_caller_that_goes_away_while_its_lease_is_written_has_one_that_ends(tmp_path):
    """The ledger has it then: without a clock of its own it would be held for ever."""
    with LiveRun(tmp_path) as run:
        secret, release = run.secret("gone"), threading.Event()
        run.lease(run.secret("first"), wait_s=0.0)  # so that groups are admitted
        call = wire.encode(wire.LeaseCall(capacity=1, have_version=0, wait_s=30.0))
        head = (
            f"POST /v1/lease HTTP/1.1\r\nHost: x\r\nContent-Type: {wire.MSGPACK}\r\n"
            f"Authorization: Bearer {secret}\r\nContent-Length: {len(call)}\r\n"
            f"{wire.CONTENT_DIGEST}: {wire.content_digest(call)}\r\n\r\n"
        )
        leasing = threading.Event()
        lease = run.coordinator.ledger.lease

        def slow_lease(*args, **kwargs):
            leasing.set()
            assert release.wait(SOON_S)
            return lease(*args, **kwargs)

        run.coordinator.ledger.lease = slow_lease
        with run.connect() as line:
            line.sendall(head.encode() + call)
            assert leasing.wait(SOON_S)
        wait_until(lambda: not run.server._uvicorn.server_state.tasks)
        release.set()
        wait_until(lambda: run.ledger.num_leased().get("gone") == 1)
        wait_until(lambda: len(run.coordinator.lease_manager.leases) == 2)
