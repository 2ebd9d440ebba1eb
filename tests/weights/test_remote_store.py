"""A store behind a URL: what a real S3 server may do wrong, and what is said of it. What all stores promise is tested
in test_pieces.py."""

import logging
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from s3_server import KEY, SECRET, S3Server

from offbeat.errors import UserError
from offbeat.weights import piece_store
from offbeat.weights.manifest import manifest_digest
from offbeat.weights.piece_store import PieceMissing, RemoteStore, StoreError, open_store
from offbeat.weights.signing import SigningKey, seal

fsspec = pytest.importorskip("fsspec", reason="needs the extra 'remote'")

DATA = b"some bytes" * 1000
DIGEST = blake3(DATA).hexdigest()
MANIFEST = b'{"number":1}'
NAME, SEALED = manifest_digest(MANIFEST), seal(MANIFEST, SigningKey.generate())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_store, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(piece_store, "MAX_PAUSE_S", 0.02)


@pytest.fixture
def url(s3: S3Server) -> str:
    return f"s3://bucket/{secrets.token_hex(8)}"


def test_a_piece_as_large_as_they_come_makes_its_way(url: str):
    data = blake3(b"large").digest(32 * 1024 * 1024)
    digest, store = blake3(data).hexdigest(), RemoteStore(url)
    store.put(digest, data)
    assert store.get(digest) == data
    assert store.get(digest, 20_000_000, 20_000_010) == data[20_000_000:20_000_010]


@pytest.mark.full
def test_a_store_that_fails_now_and_then_is_asked_again(s3: S3Server, url: str, caplog: pytest.LogCaptureFixture):
    store = RemoteStore(url)
    for call in (
        lambda: store.put(DIGEST, DATA),
        lambda: store.get(DIGEST),
        lambda: store.put_manifest(1, NAME, SEALED),
        lambda: store.list_pieces(),
    ):
        caplog.clear()
        s3.break_(num_busy=8)  # more than its client puts up with by itself
        call()
        assert "trying again in" in caplog.text
    assert (store.list_pieces(), store.list_manifests()) == ([DIGEST], [(1, NAME)])


@pytest.mark.full
def test_a_store_that_keeps_failing_is_given_up_and_named(s3: S3Server, url: str):
    store = RemoteStore(url)
    s3.break_(num_busy=1_000_000)
    with pytest.raises(StoreError, match=rf"{url}/pieces/.*: cannot be written: .*; check that the store can be"):
        store.put(DIGEST, DATA)
    assert (
        piece_store.MAX_ATTEMPTS <= s3.num_calls("PUT") <= 6 * piece_store.MAX_ATTEMPTS
    )  # its client tries again by itself
    with pytest.raises(StoreError, match=rf"{url}/pieces/.*: cannot be looked up: .*; check that the store can be"):
        store.size(DIGEST)


def test_a_store_that_is_full_says_so_at_once_and_loses_nothing(s3: S3Server, url: str):
    store = RemoteStore(url)
    store.put(DIGEST, DATA)
    s3.break_(is_full=True)
    other = blake3(b"other").hexdigest()
    with pytest.raises(StoreError, match=rf"{url}/pieces/.*: cannot be written: .*; free space in the store$"):
        store.put(other, b"other")
    assert s3.num_calls("PUT") <= 2
    with pytest.raises(StoreError, match=r"manifests/00000001.*; free space in the store$"):
        store.put_manifest(1, NAME, SEALED)
    assert store.get(DIGEST) == DATA
    assert (store.list_pieces(), store.list_manifests()) == ([DIGEST], [])
    s3.break_()
    store.put(other, b"other")
    assert store.get(other) == b"other"


def test_a_slow_store_is_waited_for(s3: S3Server, url: str):
    store = RemoteStore(url)
    s3.break_(delay_s=0.3)
    store.put(DIGEST, DATA)
    assert store.get(DIGEST) == DATA


@pytest.mark.full
def test_a_store_that_does_not_answer_in_time_is_given_up(s3: S3Server, url: str):
    store = RemoteStore(url, within_s=5.0)  # within which a busy machine answers the calls that follow
    s3.break_(hang_s=60.0)
    with pytest.raises(
        StoreError,
        match=r"cannot be written: TimeoutError: the store did not answer within 5 s; check",
    ):
        store.put(DIGEST, DATA)
    assert store.size(DIGEST) is None
    store.put(DIGEST, DATA)  # the next call is not hindered by the one that hangs
    assert store.get(DIGEST) == DATA


def test_nobody_at_the_address_is_an_error_that_names_the_url(monkeypatch: pytest.MonkeyPatch, s3: S3Server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": KEY, "secret": SECRET}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    with pytest.raises(StoreError, match=r"s3://bucket/x/pieces/.*: cannot be read: .*; check that the store can be"):
        RemoteStore("s3://bucket/x", within_s=5.0).get(DIGEST)


def test_a_bucket_that_is_not_there_is_not_made_in_silence(s3: S3Server):
    store = RemoteStore("s3://no-such-bucket/run")
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/run/pieces/.*: cannot be written: no such bucket"):
        store.put(DIGEST, DATA)
    with pytest.raises(PieceMissing):
        store.get(DIGEST)
    assert store.list_pieces() == []


def test_without_credentials_the_remedy_is_to_see_to_them(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3.endpoint})
    with pytest.raises(StoreError, match=r"cannot be written: .*redentials.*; check the store's credentials"):
        RemoteStore("s3://bucket/x").put(DIGEST, DATA)


def test_a_users_own_settings_of_the_client_hold(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch):
    own = {**fsspec.config.conf["s3"], "config_kwargs": {"read_timeout": 7, "s3": {"addressing_style": "path"}}}
    monkeypatch.setitem(fsspec.config.conf, "s3", own)
    used = RemoteStore(url)._files.config_kwargs
    assert (used["read_timeout"], used["connect_timeout"]) == (7, piece_store.CONNECT_WITHIN_S)
    assert used["s3"] == {"addressing_style": "path"}


def test_what_others_put_meanwhile_is_seen(url: str):
    ours, theirs = RemoteStore(url), RemoteStore(url)
    assert (ours.list_pieces(), ours.list_manifests(), ours.size(DIGEST)) == ([], [], None)
    theirs.put(DIGEST, DATA)
    theirs.put_manifest(1, NAME, SEALED)
    assert (ours.list_pieces(), ours.list_manifests(), ours.size(DIGEST)) == ([DIGEST], [(1, NAME)], len(DATA))
    theirs.delete([DIGEST], [(1, NAME)])
    assert (ours.list_pieces(), ours.list_manifests(), ours.size(DIGEST)) == ([], [], None)


def test_of_two_that_seal_the_same_manifest_at_once_the_one_that_loses_is_told(monkeypatch: pytest.MonkeyPatch):
    store, theirs = RemoteStore(f"memory://{secrets.token_hex(8)}"), seal(MANIFEST, SigningKey.generate())
    write = store._files.pipe_file
    monkeypatch.setattr(store._files, "pipe_file", lambda path, data: (write(path, data), write(path, theirs)))
    with pytest.raises(StoreError, match="signed with another key"):
        store.put_manifest(1, NAME, SEALED)
    assert store.get_manifest(1, NAME) == theirs


class Angry(fsspec.AbstractFileSystem):
    """A store whose errors quote all that it was given."""

    protocol = "angry"
    url = "angry://me:pass%2Fword@host/run?token=tok-123"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("angry://").rpartition("@")[2].partition("?")[0]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        raise ConnectionError(f"could not write to {self.url} as me with\npass/word and tok-123")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


def test_the_credentials_of_a_url_are_neither_told_nor_logged(caplog: pytest.LogCaptureFixture):
    fsspec.register_implementation("angry", Angry, clobber=True)
    caplog.set_level(logging.DEBUG)
    store = open_store(Angry.url)
    assert isinstance(store, RemoteStore)
    with pytest.raises(
        StoreError, match=r"^angry://host/run/pieces/.*: cannot be written: Conn.*with \*\*\*"
    ) as caught:
        store.put(DIGEST, DATA)
    assert "trying again" in caplog.text
    told = f"{caught.value} {caught.value.__cause__} {caught.value.__context__} {caplog.text}"
    assert not any(secret in told for secret in ("pass%2Fword", "pass/word", "token=tok-123"))


def test_a_url_that_nothing_can_reach_is_a_users_mistake():
    with pytest.raises(UserError, match=r"nosuch://x: cannot be used as a store: .*nosuch"):
        open_store("nosuch://x")


def test_without_fsspec_the_error_says_what_to_install():
    code = "import sys; sys.modules['fsspec'] = None\nfrom offbeat.weights.piece_store import open_store\nopen_store('s3://b/x')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a store at s3://b/x needs the package fsspec" in done.stderr
    assert "pip install 'offbeat[remote]'" in done.stderr
