"""Collection never takes what a kept version stands on, nor what is just being published, and takes the rest."""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from offbeat.weights.collect import SPARED_S, collect
from offbeat.weights.manifest import Base, Kind, Manifest, PieceEntry, manifest_digest, tensors_digest
from offbeat.weights.piece_store import FolderStore, StoreError, open_store
from offbeat.weights.signing import SigningKey, open_sealed, seal

KEY, OTHER = SigningKey(bytes(range(32))), SigningKey(bytes(32))
NOTHING = tensors_digest([])


def name_of(seed: int) -> str:
    return blake3(str(seed).encode()).hexdigest()


def manifest(number: int, base: int | None, pieces: list[int]) -> Manifest:
    """Of a model without tensors, which names any pieces all the same."""
    return Manifest(
        number=number,
        step=number,
        parent=None,
        digest=NOTHING,
        kind=Kind.FULL if base is None else Kind.DELTA,
        base=None if base is None else Base(base, NOTHING),
        tensors=[],
        pieces=[PieceEntry(name_of(seed), len(str(seed))) for seed in pieces],
    )


def decode(sealed: bytes) -> Manifest:
    return Manifest.decode(open_sealed(sealed, [KEY.public]))


def put_piece(store: FolderStore, seed: int) -> None:
    store.put(name_of(seed), str(seed).encode())


def publish(store: FolderStore, number: int, base: int | None, pieces: list[int], key: SigningKey = KEY) -> None:
    for seed in pieces:
        put_piece(store, seed)
    store.sync()
    put_manifest(store, manifest(number, base, pieces), key)


def put_manifest(store: FolderStore, published: Manifest, key: SigningKey = KEY) -> None:
    data = published.encode()
    store.put_manifest(published.number, manifest_digest(data), seal(data, key))


def held(store: FolderStore) -> tuple[list[int], set[int]]:
    """The numbers of the manifests and the seeds of the pieces that are there."""
    seeds = {name_of(seed): seed for seed in range(100)}
    return [number for number, _ in store.list_manifests()], {seeds[digest] for digest in store.list_pieces()}


@st.composite
def histories(draw: st.DrawFn) -> dict[int, Manifest]:
    """Versions, some missing, each full or upon an older one that may be missing."""
    numbers = sorted(draw(st.sets(st.integers(0, 30), max_size=12)))
    found = {}
    for number in numbers:
        base = draw(st.none() | st.integers(0, number - 1)) if number else None
        found[number] = manifest(number, base, draw(st.lists(st.integers(0, 20), max_size=4)))
    return found


def chain(manifests: Mapping[int, Manifest], number: int | None) -> list[Manifest]:
    """A version and all that it stands on, as far as it is there."""
    found = []
    while number is not None and number in manifests:
        found.append(manifests[number])
        number = manifests[number].base.number if manifests[number].base else None
    return found


def needed(manifests: Mapping[int, Manifest], in_use: Collection[int]) -> tuple[set[str], set[int]]:
    """The pieces and versions of the chains of what is in use, and of the newest."""
    numbers = {*in_use, *([max(manifests)] if manifests else [])}
    chains = [found for number in numbers for found in chain(manifests, number)]
    return {piece.digest for found in chains for piece in found.pieces}, {found.number for found in chains}


@pytest.mark.full
@given(histories(), st.sets(st.integers(0, 30)))
@settings(max_examples=60)
def test_a_store_is_left_with_what_is_needed_and_nothing_else(manifests, in_use):
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(Path(folder))
        for number, found in manifests.items():
            for piece in found.pieces:
                store.put(piece.digest, b"")
            put_manifest(store, found)
            stamp(store, float(number + 1))
        pieces, numbers = needed(manifests, in_use)
        collect(store, in_use, decode)
        assert {number for number, _ in store.list_manifests()} == numbers
        assert set(store.list_pieces()) == pieces


def stamp(store: FolderStore, now_s: float) -> None:
    """Gives what was put since the last time this moment, which is later than all before it."""
    for path in store.folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime > 1e6:
            os.utime(path, (now_s, now_s))


class Store(RuleBasedStateMachine):
    """A trainer publishes in small steps, and dies now and then; somebody collects at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FolderStore(Path(tempfile.mkdtemp()))
        self.published: dict[int, Manifest] = {}
        self.in_use: set[int] = set()
        self.under_way: list[int] = []
        self.abandoned: set[int] = set()
        self.put_s: dict[str, float] = {}
        self.named_s: dict[int, float] = {}
        self.late: set[str] = set()
        """Pieces that were put again after the last manifest that was dropped with them: their age must tell."""
        self.next, self.now_s = 0, time.time()

    def teardown(self) -> None:
        shutil.rmtree(self.store.folder)

    @rule(seed=st.integers(0, 3))
    def put(self, seed: int) -> None:
        """Pieces recur: a tensor that stays is published again with the next full version."""
        put_piece(self.store, seed)
        self.touch(self.store.folder / "pieces" / name_of(seed)[:2] / name_of(seed))
        self.put_s[name_of(seed)] = self.now_s
        self.under_way.append(seed)

    @rule(back=st.none() | st.integers(1, 3))
    def name(self, back: int | None) -> None:
        base = None if back is None or self.next - back not in self.kept() else self.next - back
        found = manifest(self.next, base, self.under_way)
        put_manifest(self.store, found)
        self.touch(self.store.folder / "manifests" / f"{self.next:08d}-{manifest_digest(found.encode())}.json")
        self.published[self.next], self.named_s[self.next] = found, self.now_s
        self.under_way, self.next = [], self.next + 1

    @precondition(lambda self: self.under_way)
    @rule()
    def die(self) -> None:
        self.abandoned |= set(self.under_way)
        self.under_way = []
        self.next += 1

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.in_use = set(data.draw(st.lists(st.sampled_from(sorted(self.published)), max_size=3)))

    @rule()
    def collect(self) -> None:
        collect(self.store, self.in_use, decode)
        kept = self.kept()
        named_s: dict[str, float] = {}
        for number in sorted(self.published.keys() - kept):
            named_s.update({piece.digest: self.named_s[number] for piece in self.published[number].pieces})
        self.late -= named_s.keys()
        self.late |= {piece for piece, last_s in named_s.items() if self.put_s[piece] > last_s}
        self.published = {number: found for number, found in self.published.items() if number in kept}
        self.in_use &= kept
        assert {number for number, _ in self.store.list_manifests()} == kept
        spared = {name_of(seed) for seed in {*self.under_way, *self.abandoned}}
        assert set(self.store.list_pieces()) <= needed(self.published, self.in_use)[0] | spared | self.late

    @invariant()
    def what_is_needed_is_there(self) -> None:
        there = set(self.store.list_pieces())
        assert needed(self.published, self.in_use)[0] <= there
        assert {name_of(seed) for seed in self.under_way} <= there

    def kept(self) -> set[int]:
        return needed(self.published, self.in_use)[1]

    def touch(self, path: Path) -> None:
        self.now_s += 1.0
        os.utime(path, (self.now_s, self.now_s))


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_piece_put_again_for_a_version_that_went_first_is_spared_for_a_day(tmp_path):
    store = FolderStore(tmp_path)
    now_s = time.time()
    for number in (0, 1):
        publish(store, number, None, [2])
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_mtime > now_s - 60:
                os.utime(path, (now_s - 1000 + number, now_s - 1000 + number))
    publish(store, 2, None, [3])
    collect(store, {0}, decode)
    collect(store, (), decode)
    assert set(store.list_pieces()) == {name_of(2), name_of(3)}
    collect(store, (), decode, spared_s=0.0)
    assert set(store.list_pieces()) == {name_of(3)}


def test_what_a_dead_publisher_left_goes_after_a_day(tmp_path):
    store = FolderStore(tmp_path)
    publish(store, 1, None, [1])
    put_piece(store, 2)
    unfinished = tmp_path / "pieces" / "ab" / f"{name_of(3)}.ff.new"
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.touch()
    collect(store, [], decode)
    assert held(store) == ([1], {1, 2})
    assert unfinished.exists()
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - SPARED_S - 10,) * 2)
    collect(store, [], decode)
    assert held(store) == ([1], {1})
    assert not unfinished.exists()


def test_a_dropped_versions_piece_that_is_put_again_for_the_next_one_is_spared(tmp_path):
    store = FolderStore(tmp_path)
    publish(store, 1, None, [1, 2])
    publish(store, 2, None, [3])
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 60.0,) * 2)
    put_piece(store, 1)
    collect(store, [], decode)
    assert held(store) == ([2], {1, 3})


def test_two_manifests_of_one_number_are_kept_with_both_chains(tmp_path):
    store = FolderStore(tmp_path)
    publish(store, 1, None, [1])
    publish(store, 2, None, [2])
    publish(store, 3, 1, [3])
    publish(store, 3, 2, [4])
    publish(store, 4, None, [5])
    collect(store, [3], decode)
    assert held(store) == ([1, 2, 3, 3, 4], {1, 2, 3, 4, 5})
    collect(store, [], decode)
    assert held(store) == ([4], {5})


def test_what_another_key_has_signed_is_left_alone_with_its_pieces(tmp_path):
    store = FolderStore(tmp_path)
    publish(store, 1, None, [1, 2])
    publish(store, 7, None, [2, 3], key=OTHER)
    publish(store, 2, None, [4])
    publish(store, 3, None, [5])
    for path in tmp_path.rglob("*"):
        os.utime(path, (1.0, 1.0))
    collect(store, [], decode)
    assert held(store) == ([3, 7], {2, 3, 5})


def test_while_a_kept_manifest_cannot_be_read_everything_older_stays(tmp_path, caplog):
    store = FolderStore(tmp_path)
    for number in range(1, 5):
        publish(store, number, number - 1 if number > 1 else None, [number])
    publish(store, 5, None, [5])
    publish(store, 6, None, [6])
    spoilt = next(tmp_path.glob("manifests/00000003-*"))
    whole = spoilt.read_bytes()
    spoilt.write_bytes(whole[:-20])
    for path in tmp_path.rglob("*"):
        os.utime(path, (1.0, 1.0))
    collect(store, [4], decode)
    assert held(store) == ([1, 2, 3, 4, 6], {1, 2, 3, 4, 6})
    assert "version 3 and all versions that it may need stay" in caplog.text
    spoilt.write_bytes(whole)
    collect(store, [6], decode)
    assert held(store) == ([6], {6})


def test_a_collection_cut_short_is_completed_by_the_next(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    publish(store, 1, None, [1, 2])
    publish(store, 2, None, [3])
    deleted = []

    def give_up(path: Path, missing_ok: bool = False) -> None:
        if deleted:
            raise OSError("power cut")
        deleted.append(path)
        os.unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", give_up)
        with pytest.raises(StoreError, match="power cut"):
            collect(store, [], decode)
    numbers, pieces = held(store)
    assert numbers == [1, 2]
    assert len(pieces) == 2
    collect(store, [], decode)
    assert held(store) == ([2], {3})


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_store_behind_a_url_is_collected_the_same_way(kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    pytest.importorskip("fsspec", reason="needs the extra 'remote'")
    if kind == "s3":
        request.getfixturevalue("s3")
    store = open_store(f"{'s3://bucket' if kind == 's3' else 'memory:/'}/{name_of(tmp_path.stat().st_ino)}")
    publish(store, 1, None, [1, 2])
    publish(store, 2, 1, [3])
    publish(store, 3, None, [2, 4])
    put_piece(store, 5)
    collect(store, [2], decode)
    assert held(store) == ([1, 2, 3], {1, 2, 3, 4, 5})
    collect(store, [], decode)
    assert held(store) == ([3], {2, 4, 5})
    collect(store, [], decode, spared_s=-3600.0)
    assert held(store) == ([3], {2, 4})


def test_an_anchors_twin_is_kept_with_it_but_not_what_the_twin_stands_on(tmp_path):
    store = FolderStore(tmp_path)
    publish(store, 0, None, [0])
    publish(store, 1, 0, [1])
    for seed in (2, 20):
        put_piece(store, seed)
    store.sync()
    twin = manifest(2, 1, [2])
    put_manifest(store, twin)
    put_manifest(store, structs.replace(manifest(2, None, [20]), delta=manifest_digest(twin.encode())))
    publish(store, 3, 2, [3])
    collect(store, [3], decode)
    assert {number for number, _ in store.list_manifests()} == {2, 3}
    assert set(store.list_pieces()) == {name_of(seed) for seed in (2, 20, 3)}
