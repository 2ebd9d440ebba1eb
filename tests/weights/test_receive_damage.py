"""Receiving versions of which something is damaged, gone or another's: it is had again, or named and never taken."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_disk import no_file_over
from msgspec import structs
from published import Faulty, Run, flip, pieces_in
from receiving import fetch, manifest_of, names

from offbeat.errors import OffbeatError
from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import manifest_digest
from offbeat.weights.receive import ReceiveFigures
from offbeat.weights.signing import SigningKey, open_sealed, seal
from offbeat.weights.version import Version, WeightsError


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


# --- what is damaged on the way ---


def test_a_piece_that_arrives_damaged_is_fetched_again(run):
    version, harmed = run.publish(), []

    def harm(digest: str, path: Path) -> None:
        if len(harmed) < 2:
            harmed.append(digest)
            flip(path)

    run.check(fetch(run.receiver(sources=Faulty(run.store, harm)), version), version)
    assert len(harmed) == 2


@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1])], ids=["flip", "cut"])
def test_a_piece_that_always_arrives_damaged_is_given_up_by_name(run, harm):
    version = run.publish()
    receiver = run.receiver(sources=Faulty(run.store, lambda digest, path: harm(path)))
    piece = manifest_of(run, version).pieces[0].digest
    with pytest.raises(WeightsError, match=rf"version 0 .*piece {piece} arrived damaged 3 times"):
        fetch(receiver, version)
    assert names(receiver.cache.folder) == []
    assert pieces_in(receiver.cache.folder) == []


def test_a_line_that_breaks_costs_only_what_had_not_arrived(run):
    version, broken = run.publish(), []

    def cut(digest: str, path: Path) -> None:
        if not broken:
            broken.append(digest)
            path.write_bytes(path.read_bytes()[:1000])
            raise OffbeatError("the line is down")

    sources = Faulty(run.store, cut)
    receiver = run.receiver(sources=sources)
    with pytest.raises(OffbeatError, match="the line is down"):
        fetch(receiver, version)
    run.check(fetch(receiver, version), version)
    assert [asked for asked in sources.asked if asked[0] == broken[0]] == [(broken[0], 0), (broken[0], 1000)]


def test_a_piece_that_is_gone_is_named_with_its_version_and_the_earlier_one_stays(run):
    receiver = run.receiver()
    first = run.publish()
    here = fetch(receiver, first)
    version = run.publish()
    (piece,) = manifest_of(run, version).pieces
    run.store.delete([piece.digest], [])
    with pytest.raises(WeightsError, match=rf"version 1 cannot be fetched: .*{piece.digest}"):
        fetch(receiver, version)
    run.check(here, first)


def test_where_the_chain_has_a_gap_a_copy_of_the_whole_file_takes_its_place(run):
    _, second, third = (run.publish() for _ in range(3))
    run.store.delete([], [(1, second.manifest)])
    with pytest.raises(WeightsError, match="version 2 cannot be fetched: the store has no manifest of version 1"):
        fetch(run.receiver(), third)
    figures: list[ReceiveFigures] = []
    receiver = run.receiver(copy=run.copy, report=figures.append)
    run.check(fetch(receiver, third), third)
    assert (figures[0].num_applied, set(figures[0].num_bytes)) == (0, {"copy"})
    fourth = run.publish()
    run.check(fetch(receiver, fourth), fourth)


def test_a_copy_that_is_damaged_is_never_taken(run):
    version = run.publish()
    run.store.delete([manifest_of(run, version).pieces[0].digest], [])
    flip(version.path / "model.safetensors", -5)
    receiver = run.receiver(copy=run.copy)
    with pytest.raises(
        WeightsError,
        match=r"version 0 cannot be fetched: .*; its whole files .* arrived damaged 3",
    ):
        fetch(receiver, version)
    assert names(receiver.cache.folder) == []


def test_peers_can_be_told_of_everything_that_arrives_and_what_is_still_expected(run):
    version, seen = run.publish(), []
    receiver = run.receiver(arrived=lambda: seen.append((len(pieces_in(folder)), set(receiver.downloads.expected))))
    folder = receiver.cache.folder
    fetch(receiver, version)
    (piece,) = manifest_of(run, version).pieces
    assert seen == [(0, set()), (1, set())]

    seen.clear()
    asking = Faulty(run.store, lambda digest, path: seen.append(set(other.downloads.expected)))
    other = run.receiver("other", sources=asking)
    fetch(other, version)
    assert seen == [{piece.digest}]


def test_a_line_that_is_down_is_no_reason_to_take_another_way(run):
    version, copied = run.publish(), []

    async def copy(number: int, into: Path) -> None:
        copied.append(number)

    class Down(StoreSources):
        async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
            raise OffbeatError("the line is down")

    with pytest.raises(OffbeatError, match="the line is down"):
        fetch(run.receiver(sources=Down(run.store), copy=copy), version)
    assert copied == []


# --- manifests that are not what was asked for ---


class Replaying(StoreSources):
    """Answers with another version's manifest."""

    def __init__(self, run: Run, version: Version):
        super().__init__(run.store)
        self._sealed = run.store.get_manifest(version.number, version.manifest)

    async def manifest(self, number: int, digest: str) -> bytes:
        return self._sealed


def test_an_older_manifest_is_not_taken_for_a_newer_one(run):
    first, second = run.publish(), run.publish()
    with pytest.raises(WeightsError, match="version 1 has no manifest that can be trusted"):
        fetch(run.receiver(sources=Replaying(run, first)), second)


def test_another_manifest_of_the_same_version_is_not_the_one_that_the_ledger_names(run):
    run.publish()
    version = run.publish()
    data = structs.replace(manifest_of(run, version), parent=None).encode()
    run.store.put_manifest(1, manifest_digest(data), seal(data, run.key))
    other = replace(version, parent=None, manifest=manifest_digest(data))
    with pytest.raises(WeightsError, match=r"version 1 has no manifest that can be trusted: .*: the manifest has"):
        fetch(run.receiver(sources=Replaying(run, other)), version)


@pytest.mark.parametrize("told", [{"step": 7}, {"digest": "0" * 64}, {"number": 3}], ids=lambda told: next(iter(told)))
def test_a_manifest_of_another_step_digest_or_number_is_refused(run, told):
    version = run.publish()
    with pytest.raises(WeightsError, match=r"version \d has no manifest that can be trusted: .*"):
        fetch(run.receiver(sources=Replaying(run, version)), replace(version, **told))


def test_a_manifest_that_another_key_signed_is_refused_before_any_piece_is_asked_for(run):
    version = run.publish()
    data = open_sealed(run.store.get_manifest(0, version.manifest), [run.key.public])
    run.store.delete([], [(0, version.manifest)])
    run.store.put_manifest(0, version.manifest, seal(data, SigningKey.generate()))
    sources = Faulty(run.store)
    with pytest.raises(WeightsError, match="version 0 has no manifest that can be trusted"):
        fetch(run.receiver(sources=sources, copy=run.copy), version)
    assert {number for number, _ in sources.asked} == {0}


def test_a_base_of_the_right_number_and_another_digest_is_not_built_upon(run, tmp_path):
    run.publish()
    version = run.publish()
    other = Run(tmp_path / "other")
    other.key, other.publisher.key = run.key, run.key
    stranger = other.publish(seed=1)
    run.store.delete([], [(0, run.versions[0].manifest)])
    run.store.put_manifest(0, stranger.manifest, other.store.get_manifest(0, stranger.manifest))
    with pytest.raises(WeightsError, match=r"version 1 cannot be fetched: version 0: the manifest .* other weights"):
        fetch(run.receiver(), version)


def test_of_two_manifests_under_one_number_the_published_one_is_found(run, tmp_path):
    run.publish()
    version = run.publish()
    other = Run(tmp_path / "other")
    other.publisher.key = run.key
    for seed in (1, 2):
        other.versions.clear()
        stranger = other.publish(seed=seed)
        run.store.put_manifest(0, stranger.manifest, other.store.get_manifest(0, stranger.manifest))
    run.check(fetch(run.receiver(), version), version)


def test_a_version_without_a_manifest_is_refused(run):
    with pytest.raises(OffbeatError, match="version 0 was published without a manifest"):
        fetch(run.receiver(), replace(run.publish(), manifest=""))


# --- what is damaged on this disk ---


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_version_that_was_damaged_on_this_disk_is_fetched_again(run, is_restarted):
    version = run.publish()
    receiver = run.receiver()
    here = fetch(receiver, version)
    flip(here.path / "model.safetensors", -5, keep_time=is_restarted)
    run.check(fetch(run.receiver() if is_restarted else receiver, version), version)


def test_a_base_that_was_damaged_on_this_disk_is_not_built_upon(run):
    receiver = run.receiver()
    here = fetch(receiver, run.publish())
    flip(here.path / "model.safetensors", -5)
    figures: list[ReceiveFigures] = []
    receiver = run.receiver(report=figures.append)
    version = run.publish()
    run.check(fetch(receiver, version), version)
    assert figures[0].num_applied == 2


def test_a_base_whose_damage_nobody_could_see_is_found_out_and_nothing_here_is_built_upon(run):
    figures: list[ReceiveFigures] = []
    receiver = run.receiver(report=figures.append)
    here = [fetch(receiver, run.publish()) for _ in range(2)][-1]
    for position in range(-1400, -1000):  # in a tensor that the next version changes
        flip(here.path / "model.safetensors", position, keep_time=True)
    version = run.publish(num_changed=3000)
    run.check(fetch(receiver, version), version)
    assert figures[-1].num_applied == 3
    run.check(fetch(receiver, run.versions[1]), run.versions[1])  # what was doubted is read again, and replaced


def test_pieces_that_an_earlier_process_left_are_used_if_they_are_right(run):
    version = run.publish()
    receiver = run.receiver()
    fetch(receiver, version)
    asyncio.run(receiver.discard(version))
    again = Faulty(run.store)
    run.check(fetch(run.receiver(sources=again), version), version)
    assert again.asked == []
    asyncio.run(receiver.discard(version))
    flip(pieces_in(receiver.cache.folder)[0], keep_time=True)
    run.check(fetch(run.receiver(sources=again), version), version)
    assert len(again.asked) == 1


def test_a_manifest_that_was_damaged_on_this_disk_is_fetched_again(run):
    version = run.publish()
    here = fetch(run.receiver(), version)
    (manifest,) = here.path.parent.glob("manifests/*.json")
    flip(manifest, 100)
    run.check(fetch(run.receiver(), version), version)


@pytest.mark.parametrize("max_file_bytes", [100, 5000, 30000], ids=["manifest", "piece", "whole"])
def test_a_disk_that_is_full_is_told_in_one_line_and_loses_nothing(run, max_file_bytes):
    receiver = run.receiver()
    first = run.publish()
    here = fetch(receiver, first)
    second = run.publish(num_changed=10 if max_file_bytes == 30000 else 4000)
    with no_file_over(max_file_bytes), pytest.raises(OffbeatError, match=r"free space|free some space") as told:
        fetch(receiver, second)
    assert "\n" not in str(told.value)
    run.check(here, first)
    run.check(fetch(receiver, second), second)
