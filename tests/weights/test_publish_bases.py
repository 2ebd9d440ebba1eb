"""What a version stands on: through restarts, deletions, rivals and two hundred versions."""

import shutil
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from publishing import KEY, Run, nudge, same, some

from offbeat.errors import OffbeatError
from offbeat.weights import safetensor_file
from offbeat.weights.assemble import assemble
from offbeat.weights.manifest import Anchoring, Kind
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import FILE_NAME, PIECE_BYTES, WeightsError, file_digest, weights_digest


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


# Bases


def test_a_base_whose_folder_was_deleted_still_serves(run):
    tensors = some()
    run.write(tensors)
    run.publisher.keep([])
    assert run.write(nudge(tensors)).kind is Kind.DELTA
    assert same(run.fetch(1), nudge(tensors))


def test_a_base_whose_folder_was_overwritten_by_another_still_serves(run):
    tensors = some()
    run.write(tensors)
    run.fetch(0)
    Publisher(run.folder / "weights").write(0, 0, None, nudge(tensors, seed=5))
    run.write(nudge(tensors))
    assert same(run.fetch(1, have=[0]), nudge(tensors))


def test_a_version_whose_parent_is_not_the_last_one_written_stands_on_its_parent(run):
    tensors = some()
    for seed in range(3):
        run.write(nudge(tensors, seed))
    delta = run.write(tensors, parent=0)
    assert (delta.kind, delta.base.number) == (Kind.DELTA, 0)
    assert same(run.fetch(3), tensors)


def test_without_deltas_every_version_is_full_and_names_no_other(tmp_path):
    run, tensors = Run(tmp_path, Anchoring(every=0)), some()
    manifests = [run.write(nudge(tensors, seed)) for seed in range(3)]
    assert [(found.kind, found.base, found.delta) for found in manifests] == [(Kind.FULL, None, None)] * 3
    assert same(run.fetch(2), nudge(tensors, 2))


def test_after_a_restart_the_parent_is_taken_up_where_it_is_whole(tmp_path):
    run, tensors = Run(tmp_path, Anchoring(every=4)), some()
    kinds = []
    for seed in range(6):
        kinds.append(run.write(nudge(tensors, seed)).kind)
        run.restart()
    assert [kind is Kind.FULL for kind in kinds] == [True, False, False, False, True, False]
    assert same(run.fetch(5), nudge(tensors, 5))


def flip_a_bit(run):
    file = run.versions[-1].path / FILE_NAME
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut_short(run):
    file = run.versions[-1].path / FILE_NAME
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize(
    "spoil",
    [
        flip_a_bit,
        cut_short,
        lambda run: run.publisher.keep([]),
        lambda run: shutil.rmtree(run.folder / "weights" / "manifests"),
        lambda run: next((run.folder / "weights" / "manifests").glob("00000000-*")).unlink(),
        lambda run: next((run.folder / "weights" / "manifests").glob("00000001-*")).write_bytes(b"nonsense"),
        lambda run: setattr(run.publisher, "key", SigningKey.generate()),
    ],
    ids=["bit", "cut", "gone", "no-manifests", "no-anchor", "bad-manifest", "another-key"],
)
def test_after_a_restart_a_parent_that_is_not_whole_is_no_base(run, spoil):
    run.write(some())
    run.write(nudge(some()))
    run.restart()
    spoil(run)
    version = run.publisher.write(2, 2, 1, nudge(some(), 2))
    assert run.publisher.figures.kind is Kind.FULL
    assert version.digest == weights_digest(nudge(some(), 2))


def test_two_who_publish_the_same_number_never_mix(run):
    tensors = some()
    run.write(tensors)
    run.fetch(0)
    other = Publisher(run.folder / "weights", run.store, KEY)
    versions = [
        publisher.write(1, 1, 0, nudge(tensors, seed)) for seed, publisher in enumerate([run.publisher, other], start=1)
    ]
    assert len({version.manifest for version in versions}) == 2
    assert file_digest(run.publisher.path(1) / FILE_NAME) == versions[1].digest
    for seed, version in enumerate(versions, start=1):
        assemble([run.manifest(version)], run.place(0), run.store.get, run.place(seed))
        assert same(run.place(seed), nudge(tensors, seed))
    run.versions.append(versions[0])  # the ledger took the first one's
    run.write(nudge(tensors, 3))
    assert same(run.fetch(2, have=[]), nudge(tensors, 3))


def test_who_loses_a_race_for_a_number_is_told(run, monkeypatch):
    other = Publisher(run.folder / "weights", run.store, KEY)
    settle = run.publisher._put_in_place

    def settle_late(*words):
        other.write(0, 0, None, nudge(some()))
        settle(*words)

    monkeypatch.setattr(run.publisher, "_put_in_place", settle_late)
    with pytest.raises(WeightsError, match="cannot write the weights of step 0"):
        run.publisher.write(0, 0, None, some())
    assert same(run.publisher.path(0), nudge(some()))


# For long


@pytest.mark.full
def test_after_200_versions_who_followed_and_who_joined_late_hold_what_was_published(tmp_path):
    run, tensors = Run(tmp_path, Anchoring(every=40)), some()
    for number in range(200):
        tensors = nudge(tensors, seed=number)
        run.write(tensors)
        run.publisher.keep([number])
        run.fetch(number, have=[number - 1])
        if number >= 2:
            shutil.rmtree(run.place(number - 2))
    published = (run.versions[-1].path / FILE_NAME).read_bytes()
    assert (run.place(199) / FILE_NAME).read_bytes() == published
    joined = run.fetch(150, have=[])
    assert file_digest(joined / FILE_NAME) == run.versions[150].digest
    for number in range(151, 200):
        joined = run.fetch(number, have=[number - 1])
    assert (joined / FILE_NAME).read_bytes() == published
    assert same(joined, tensors)


CHANGES = st.sampled_from(["nudge", "new", "drop", "reshape", "dense", "same", "restart", "forget", "resume"])


@settings(max_examples=25)
@given(st.lists(CHANGES, max_size=10), st.integers(1, 5))
def test_whatever_changes_a_follower_and_a_joiner_hold_what_was_published(tmp_path_factory, changes, every):
    run, tensors = Run(tmp_path_factory.mktemp("run"), Anchoring(every=every)), some()
    run.write(tensors)
    run.fetch(0)
    for seed, change in enumerate(changes):
        if change == "nudge":
            tensors = nudge(tensors, seed)
        elif change == "new":
            tensors = {**tensors, f"new.{seed}": torch.full((4,), float(seed))}
        elif change == "drop":
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("new")}
        elif change == "reshape":
            tensors = {**tensors, "bias": tensors["bias"].reshape(*tensors["bias"].shape, 1)}
        elif change == "dense":
            tensors = {**tensors, "embed": some(seed)["embed"]}
        elif change == "restart":
            run.restart()
        elif change == "forget":
            run.publisher.keep([])
        run.write(tensors, parent=0 if change == "resume" else "last")
        number = len(run.versions) - 1
        assert same(run.fetch(number, have=range(number)), tensors)
        assert same(run.fetch(number, have=[]), tensors)


@pytest.mark.full
def test_memory_holds_a_few_parts_whatever_the_model_weighs(run, monkeypatch):
    monkeypatch.setattr(safetensor_file, "MAX_THREADS", 1)
    tensors = {f"{index}": torch.zeros(PIECE_BYTES, dtype=torch.bfloat16) for index in range(8)}  # 256 MiB
    run.write(tensors)
    for tensor in tensors.values():
        tensor[::100] = 1
    tracemalloc.start()
    run.write(tensors)
    run.fetch(1, have=[])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * PIECE_BYTES


def test_the_parts_error_ends_the_pass_and_no_thread_works_on():
    begun = []

    def work(item):
        begun.append(item)
        if item == 3:
            raise OffbeatError("no more")
        return item

    done = safetensor_file.in_parallel(work, range(1000))
    assert [next(done) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OffbeatError, match="no more"):
        next(done)
    assert len(begun) < 3 + 2 * safetensor_file.MAX_THREADS
