"""A publisher or a worker that is killed anywhere leaves the old version or the new one, whole, and is made good."""

import multiprocessing
import random
import shutil
import signal
import sys
from itertools import count

import dying_publisher
import pytest
from blake3 import blake3
from dying_publisher import follow, key_of, manifests, publish, store_of, tensors

from offbeat.weights.publish import Publisher
from offbeat.weights.version import FILE_NAME, file_digest, weights_digest

FULL = pytest.mark.full
NUM_RANDOM = 15
WITHIN_S = 60.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "offbeat.weights.publish", "offbeat.weights.assemble"])
"""Which is what takes long when a process starts, so it is done once."""


def run(work, *words, die_at=None, after_s=None) -> int:
    """The status of a process that does some work; it dies at its n-th call, or is killed after a while."""
    begun = PROCESSES.Event()
    process = PROCESSES.Process(target=dying_publisher.do, args=(work, words, die_at, begun))
    process.start()
    assert begun.wait(WITHIN_S)
    if after_s is not None:
        process.join(after_s)
        process.kill()
    process.join(WITHIN_S)
    assert process.exitcode in (0, -signal.SIGKILL), f"it went on for {WITHIN_S} s or failed: {process.exitcode}"
    return process.exitcode


def check_whole(folder, numbers) -> None:
    """Whatever has a name is all there: manifests, their pieces, the versions that they make, whole files."""
    named = manifests(folder)
    assert set(named) <= set(numbers)
    for manifest in named.values():
        assert manifest.digest == weights_digest(tensors(manifest.number))
        assert all(store_of(folder).size(piece.digest) == piece.num_bytes for piece in manifest.pieces)
        assert manifest.base is None or named[manifest.base.number].digest == manifest.base.digest
    chain = sorted(named)
    if chain:
        assert file_digest(follow(folder, chain) / FILE_NAME) == named[chain[-1]].digest
    for number in numbers:
        file = folder / "weights" / f"{number:08d}" / FILE_NAME
        assert not file.parent.exists() or file_digest(file) == weights_digest(tensors(number))


def check_published(folder, number) -> None:
    """It succeeds at last, and nothing of the attempts before is left."""
    version = publish(folder, number)
    assert version.digest == weights_digest(tensors(number))
    check_whole(folder, range(number + 1))
    assert number in manifests(folder)
    assert sorted(path.name for path in (folder / "weights").iterdir()) == [
        *(f"{index:08d}" for index in range(number + 1)),
        "manifests",
        "pieces",
    ]


@FULL
@pytest.mark.parametrize("number, num_before", [(0, 0), (1, 1), (1, 2)], ids=["full", "delta", "again"])
def test_a_publisher_killed_at_any_call_leaves_all_that_is_named_whole(tmp_path, number, num_before):
    key_of(tmp_path)
    for before in range(num_before):
        publish(tmp_path, before)
    for die_at in count():
        folder = tmp_path.with_name(f"{tmp_path.name}-{die_at}")
        shutil.copytree(tmp_path, folder)
        status = run(publish, folder, number, die_at=die_at)
        check_whole(folder, range(number + 1))
        assert number == 0 or 0 in manifests(folder)
        check_published(folder, number)
        shutil.rmtree(folder)
        if status == 0:
            assert die_at > 15
            return


@FULL
def test_a_publisher_that_is_killed_again_and_again_gets_there(tmp_path):
    key_of(tmp_path)
    publish(tmp_path, 0)
    die_at = 0
    while run(publish, tmp_path, 1, die_at=die_at):
        check_whole(tmp_path, range(2))
        die_at += 1
    check_published(tmp_path, 1)


@pytest.mark.parametrize("is_again", [False, pytest.param(True, marks=FULL)], ids=["new", "again"])
@pytest.mark.parametrize("first", [pytest.param(0, marks=FULL), 1], ids=["from an anchor", "from its base"])
def test_a_worker_killed_at_any_call_of_putting_a_version_together_has_the_old_one_or_the_new(
    tmp_path, first, is_again
):
    for number in range(4):
        publish(tmp_path, number)
    old = follow(tmp_path, [0])
    before = (old / FILE_NAME).read_bytes()
    new, die_at = tmp_path / "worker" / "3", 0
    if is_again:
        follow(tmp_path, range(4))
    while run(follow, tmp_path, range(first, 4), die_at=die_at):
        assert (old / FILE_NAME).read_bytes() == before
        assert not new.exists() or file_digest(new / FILE_NAME) == weights_digest(tensors(3))
        die_at += 1
    assert die_at > 8
    assert file_digest(new / FILE_NAME) == weights_digest(tensors(3))
    assert sorted(path.name for path in new.parent.iterdir()) == ["0", "3"]
    assert sorted(path.name for path in new.iterdir()) == [FILE_NAME]


@FULL
def test_killed_at_any_moment_both_get_there(tmp_path):
    moments, number = random.Random(0), 0
    key_of(tmp_path)
    num_killed = 0
    for attempt in range(NUM_RANDOM):
        after_s = moments.uniform(0, 0.05)
        if run(publish, tmp_path, number, after_s=after_s):
            num_killed += 1
            check_whole(tmp_path, range(number + 1))
        if attempt % 3 == 2:
            check_published(tmp_path, number)
            if run(follow, tmp_path, [number], after_s=moments.uniform(0, 0.02)):
                num_killed += 1
            follow(tmp_path, [number])
            assert file_digest(tmp_path / "worker" / str(number) / FILE_NAME) == weights_digest(tensors(number))
            number += 1
    assert num_killed


@pytest.mark.skipif(sys.platform != "linux", reason="looks up the names of open files")
def test_everything_that_a_manifest_names_is_durable_before_it_is_named(tmp_path):
    key_of(tmp_path)
    publish(tmp_path, 0)
    done = dying_publisher.trace(publish, tmp_path, 1)
    manifest = manifests(tmp_path)[1]
    named_at = next(
        at for at, (_, _, path) in enumerate(done) if path.parent.name == "manifests" and path.suffix == ".json"
    )
    pieces = [tmp_path / "weights" / "pieces" / piece.digest[:2] / piece.digest for piece in manifest.pieces]
    assert pieces
    for final in [*pieces, tmp_path / "weights" / "00000001"]:
        renamed_at = next(at for at, (call, _, path) in enumerate(done) if call == "name" and path == final)
        draft = done[renamed_at][1]
        content = draft / FILE_NAME if final not in pieces else draft
        assert ("fsync", content, content) in done[:renamed_at]
        assert ("fsync", final.parent, final.parent) in done[renamed_at:named_at]
    assert all(blake3(path.read_bytes()).hexdigest() == path.name for path in pieces)


def test_a_publisher_that_comes_back_stands_on_what_it_had_published(tmp_path):
    key_of(tmp_path)
    publish(tmp_path, 0)
    assert run(publish, tmp_path, 1) == 0
    assert run(publish, tmp_path, 2) == 0
    assert [manifests(tmp_path)[number].base and number - 1 for number in range(3)] == [None, 0, 1]
    assert Publisher(tmp_path / "weights").write(3, 3, 2, tensors(3)).manifest == ""
