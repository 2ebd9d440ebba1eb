"""What every store promises, in a folder, in memory and on a real S3 server; and what a folder promises besides."""

import errno
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from faulty_disk import no_file_over, small_disk

from offbeat.weights.manifest import ManifestError, manifest_digest
from offbeat.weights.piece_store import FolderStore, PieceDamaged, PieceMissing, PieceStore, StoreError, open_store
from offbeat.weights.signing import SigningKey, seal

KEY = SigningKey(bytes(range(32)))
NOWHERE = "0" * 64


def piece(seed: int, num_bytes: int = 1000) -> tuple[str, bytes]:
    data = blake3(str(seed).encode()).digest(num_bytes)
    return blake3(data).hexdigest(), data


def sealed_manifest(seed: int, key: SigningKey = KEY) -> tuple[str, bytes]:
    data = b'{"seed":%d}' % seed
    return manifest_digest(data), seal(data, key)


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "a" / "store")
    pytest.importorskip("fsspec", reason="needs the extra 'remote'")
    if request.param == "memory":
        return f"memory://{secrets.token_hex(8)}/weights"
    request.getfixturevalue("s3")
    return f"s3://bucket/{secrets.token_hex(8)}/weights"


@pytest.fixture
def store(place: str) -> PieceStore:
    return open_store(place)


def test_an_empty_store_holds_nothing(store: PieceStore):
    assert (store.list_pieces(), store.list_manifests()) == ([], [])
    assert store.size(NOWHERE) is None
    for read in (lambda: store.get(NOWHERE), lambda: store.get(NOWHERE, 3, 5), lambda: store.get(NOWHERE, 0, 0)):
        with pytest.raises(PieceMissing, match=f"{NOWHERE}: no such (file|object) in the store"):
            read()
    with pytest.raises(PieceMissing, match=f"00000003-{NOWHERE}.json: no such (file|object) in the store"):
        store.get_manifest(3, NOWHERE)
    store.sync()
    store.delete([NOWHERE], [(3, NOWHERE)])
    store.sweep(0.0)


@pytest.mark.parametrize("num_bytes", [0, 1, 70_000])
def test_a_piece_is_read_back_whole_and_in_parts_by_whoever_opens_the_store(place: str, num_bytes: int):
    digest, data = piece(1, num_bytes)
    open_store(place).put(digest, data)
    store = open_store(place)
    assert store.get(digest) == data
    assert store.size(digest) == num_bytes
    assert store.list_pieces() == [digest]
    middle = num_bytes // 2
    for start, stop in [(0, middle), (middle, None), (middle, num_bytes), (0, num_bytes), (num_bytes, None), (0, 0)]:
        assert store.get(digest, start, stop) == data[start:stop]


def test_putting_a_piece_again_changes_nothing(store: PieceStore):
    digest, data = piece(1)
    for _ in range(3):
        store.put(digest, data)
    assert store.list_pieces() == [digest]
    assert store.get(digest) == data


def test_a_part_that_ends_too_soon_is_told_from_a_piece_that_is_not_there(store: PieceStore):
    digest, data = piece(1)
    store.put(digest, data)
    for start in (0, 990, 1000, 1001):
        with pytest.raises(PieceDamaged, match="cut short"):
            store.get(digest, start, 1010)


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1], lambda data: b"", lambda data: bytes([data[0] ^ 1]) + data[1:]]
)
def test_a_spoilt_piece_is_refused_and_made_good_by_putting_it_again(store: PieceStore, spoil):
    digest, data = piece(1)
    overwrite(store, digest, spoil(data))
    with pytest.raises(PieceDamaged, match=f"{digest}: its {len(spoil(data))} bytes do not match its name"):
        store.get(digest)
    store.put(digest, data)
    assert store.get(digest) == data


def overwrite(store: PieceStore, digest: str, data: bytes) -> None:
    """As a disk or a bug might; a store does not ask whether what it is given fits its name."""
    store.put(digest, data)


def test_manifests_are_listed_by_number_and_read_back(place: str):
    store = open_store(place)
    names = [(number, sealed_manifest(seed)) for number, seed in ((12, 1), (3, 2), (3, 3), (123_456_789, 4))]
    for number, (digest, sealed) in names:
        store.put_manifest(number, digest, sealed)
    store = open_store(place)
    assert store.list_manifests() == sorted((number, digest) for number, (digest, _) in names)
    assert all(store.get_manifest(number, digest) == sealed for number, (digest, sealed) in names)
    assert store.list_pieces() == []


def test_the_same_manifest_again_changes_nothing_and_another_seal_is_refused(store: PieceStore):
    digest, sealed = sealed_manifest(1)
    store.put_manifest(3, digest, sealed)
    store.put_manifest(3, digest, sealed)
    with pytest.raises(StoreError, match=r"this manifest exists, signed with another key; give each run its own store"):
        store.put_manifest(3, *sealed_manifest(1, SigningKey.generate()))
    assert store.get_manifest(3, digest) == sealed


def test_a_manifest_under_a_name_that_is_not_its_own_or_with_a_broken_seal_is_refused(store: PieceStore):
    digest, sealed = sealed_manifest(1)
    with pytest.raises(ManifestError, match="does not match this name or its own signature"):
        store.put_manifest(3, NOWHERE, sealed)
    with pytest.raises(ManifestError, match="or its own signature"):
        store.put_manifest(3, digest, sealed[:-10])
    assert store.list_manifests() == []


def test_what_is_deleted_is_gone_and_the_rest_is_not(store: PieceStore):
    (gone, gone_data), (kept, kept_data) = piece(1), piece(2)
    (dropped, dropped_sealed), (held, held_sealed) = sealed_manifest(1), sealed_manifest(2)
    store.put(gone, gone_data)
    store.put(kept, kept_data)
    store.put_manifest(1, dropped, dropped_sealed)
    store.put_manifest(2, held, held_sealed)
    store.delete([gone, NOWHERE], [(1, dropped), (7, NOWHERE)])
    assert store.list_pieces() == [kept]
    assert store.list_manifests() == [(2, held)]
    assert store.size(gone) is None


def test_times_grow_with_every_put(store: PieceStore):
    digest, data = piece(1)
    store.put(digest, data)
    first_s = store.times().pieces[digest]
    name, sealed = sealed_manifest(1)
    store.put_manifest(4, name, sealed)
    store.put(digest, data)
    times = store.times()
    assert first_s <= times.manifests[4, name] <= times.pieces[digest]


@pytest.mark.parametrize("name", ["", "..", "../../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
def test_what_is_no_name_reaches_no_file(store: PieceStore, name: str):
    for call in (store.get, store.size, lambda name: store.put(name, b""), lambda name: store.delete([name], [])):
        with pytest.raises(PieceMissing, match="not the name of a piece"):
            call(name)
    with pytest.raises(PieceMissing, match="no manifest can have this name"):
        store.get_manifest(1, name)


def test_many_threads_put_the_same_and_other_pieces_at_once(store: PieceStore):
    pieces = [piece(seed) for seed in range(6)]
    errors = []

    def put_all() -> None:
        try:
            for digest, data in pieces:
                store.put(digest, data)
            store.put_manifest(1, *sealed_manifest(1))
        except Exception as error:  # noqa: BLE001 - told by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=put_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.list_pieces() == sorted(digest for digest, _ in pieces)
    assert all(store.get(digest) == data for digest, data in pieces)


# --- a folder ---


def test_a_folder_is_a_path_or_a_file_url(tmp_path):
    assert open_store(tmp_path / "a").folder == open_store(f"file://{tmp_path}/a").folder == tmp_path / "a"
    assert isinstance(open_store("some/folder"), FolderStore)


def test_files_lie_where_the_layout_says(tmp_path):
    store, (digest, data), (name, sealed) = FolderStore(tmp_path), piece(1), sealed_manifest(1)
    store.put(digest, data)
    store.put_manifest(12, name, sealed)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {f"pieces/{digest[:2]}/{digest}", f"manifests/00000012-{name}.json"}


@pytest.mark.parametrize("position", [3, -5, -100])
def test_a_manifest_with_a_flipped_bit_is_refused_and_made_good_by_putting_it_again(tmp_path, position: int):
    store, (name, sealed) = FolderStore(tmp_path), sealed_manifest(1)
    store.put_manifest(12, name, sealed)
    path = tmp_path / "manifests" / f"00000012-{name}.json"
    spoilt = bytearray(sealed)
    spoilt[position] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(PieceDamaged, match=f"00000012-{name}.json: the manifest does not match its name"):
        store.get_manifest(12, name)
    store.put_manifest(12, name, sealed)
    assert store.get_manifest(12, name) == sealed


def test_what_is_no_piece_or_manifest_is_not_listed_and_only_what_is_old_and_unfinished_is_swept(tmp_path):
    store, (digest, data), (name, sealed) = FolderStore(tmp_path), piece(1), sealed_manifest(1)
    store.put(digest, data)
    store.put_manifest(12, name, sealed)
    folder = tmp_path / "pieces" / digest[:2]
    strangers = [folder / f"{digest}.part", folder / "README", tmp_path / "manifests" / "notes.json"]
    unfinished = [folder / f"{digest}.ab.new", tmp_path / "manifests" / f".00000013-{name}.json.ab.draft"]
    for path in strangers + unfinished:
        path.write_bytes(b"x")
    assert (store.list_pieces(), store.list_manifests()) == ([digest], [(12, name)])
    store.sweep(older_than_s=3600.0)
    assert all(path.exists() for path in strangers + unfinished)
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (1.0, 1.0))
    store.sweep(older_than_s=3600.0)
    assert all(path.exists() for path in strangers)
    assert not any(path.exists() for path in unfinished)
    assert store.get(digest) == data
    assert store.get_manifest(12, name) == sealed


def test_a_disk_that_is_full_is_told_in_one_line_and_loses_nothing(tmp_path):
    with small_disk(tmp_path, num_bytes=400_000) as disk:
        store = FolderStore(disk / "store")
        put = [piece(seed, 50_000) for seed in range(6)]
        for digest, data in put:
            store.put(digest, data)
        digest, data = piece(7, 200_000)
        with pytest.raises(StoreError, match=r"cannot be written: No space left on device; free space there$"):
            store.put(digest, data)
        store.sync()
        assert store.list_pieces() == sorted(digest for digest, _ in put)
        assert all(store.get(digest) == data for digest, data in put)
        assert not list(disk.rglob("*.new"))
        store.delete([gone for gone, _ in put[:3]], [])
        store.put(digest, data)
        assert store.get(digest) == data


def test_a_manifest_that_does_not_fit_leaves_nothing_behind(tmp_path):
    store = FolderStore(tmp_path)
    with no_file_over(100), pytest.raises(StoreError, match=r"File too large; free space there$"):
        store.put_manifest(1, *sealed_manifest(1))
    assert list((tmp_path / "manifests").iterdir()) == []
    with no_file_over(100), pytest.raises(StoreError, match=r"File too large; free space there$"):
        store.put(*piece(1))
    assert store.list_pieces() == []
    store.put_manifest(1, *sealed_manifest(1))


def test_a_piece_is_flushed_before_it_takes_its_name(tmp_path, monkeypatch):
    """A power cut after the rename would otherwise leave a name without its bytes."""
    store, (digest, data) = FolderStore(tmp_path), piece(1)
    done, flush, rename = [], os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append(("flush", os.fstat(descriptor).st_size))
        flush(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    store.put(digest, data)
    assert done == [("flush", len(data)), ("rename", digest)]


def test_a_store_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "store").touch()
    store = FolderStore(tmp_path / "store")
    with pytest.raises(StoreError, match=r"store/pieces/.*: cannot be written: .*; a file is in its way"):
        store.put(*piece(1))
    assert store.size(NOWHERE) is None


def test_a_flush_that_fails_is_tried_again_by_the_next(tmp_path, monkeypatch):
    store, (digest, data) = FolderStore(tmp_path), piece(1)
    store.put(digest, data)
    flushed = []

    def broken(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("offbeat.weights.piece_store.fsync_folder", broken)
    with pytest.raises(StoreError, match=r"cannot be flushed: Input/output error; check that the disk works"):
        store.sync()
    monkeypatch.setattr("offbeat.weights.piece_store.fsync_folder", flushed.append)
    store.sync()
    assert {tmp_path, tmp_path / "pieces", tmp_path / "pieces" / digest[:2]} <= set(flushed)
    flushed.clear()
    store.sync()
    assert flushed == []


def test_what_an_earlier_process_put_and_did_not_flush_is_flushed_before_a_manifest_names_it(tmp_path, monkeypatch):
    digest, data = piece(1)
    FolderStore(tmp_path).put(digest, data)
    flushed = []
    monkeypatch.setattr("offbeat.weights.piece_store.fsync_folder", flushed.append)
    FolderStore(tmp_path).put_manifest(1, *sealed_manifest(1))
    assert {tmp_path / "pieces", tmp_path / "pieces" / digest[:2]} <= set(flushed)


PUT_FOREVER = """
import sys
from pathlib import Path
from blake3 import blake3
from offbeat.weights.piece_store import FolderStore
store = FolderStore(Path(sys.argv[1]))
for seed in range(1_000_000):
    data = blake3(str(seed).encode()).digest(300_000)
    store.put(blake3(data).hexdigest(), data)
    if seed == 3:
        print("under way", flush=True)
"""


@pytest.mark.parametrize("num_more", [1, 5, 9])
def test_kill_9_while_pieces_are_put_leaves_each_whole_or_not_there(tmp_path, num_more: int):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    writer = subprocess.Popen(
        [sys.executable, "-c", PUT_FOREVER, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"under way\n"
    store = FolderStore(tmp_path)
    while len(store.list_pieces()) < 4 + num_more:
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found = store.list_pieces()
    assert len(found) >= 4 + num_more
    assert all(len(store.get(digest)) == 300_000 for digest in found)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in found]
    assert all(path.suffix == ".new" for path in left)
    store.sweep(older_than_s=-60.0)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == len(found)
