"""Receiving versions: the ways that lead to one, and what is kept. What is damaged is in `test_receive_damage.py`."""

import asyncio

import pytest
from published import Faulty, Run, Unreachable, pieces_in
from receiving import fetch, manifest_of, names

from offbeat.tools.export import read
from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import Kind, Manifest
from offbeat.weights.receive import ReceiveFigures, Receiver
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import Version


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


def twin_of(run: Run, manifest: Manifest) -> Manifest:
    """What changed in an anchor; any other manifest is its own."""
    if manifest.delta is None:
        return manifest
    return Manifest.decode(open_sealed(run.store.get_manifest(manifest.number, manifest.delta), [run.key.public]))


# --- the ways that lead to a version ---


def test_who_follows_fetches_what_changed_in_an_anchor_and_who_joins_late_takes_it_whole(run):
    figures = list[ReceiveFigures]()
    follower = run.receiver("follower", report=figures.append)
    for _ in range(9):  # every fourth is an anchor
        run.check(fetch(follower, run.publish()), run.versions[-1])
    kinds = [list(figure.num_bytes) for figure in figures]
    assert kinds == [["full"], *[["delta"]] * 8]
    assert manifest_of(run, run.versions[8]).kind is Kind.FULL
    late = list[ReceiveFigures]()
    run.check(fetch(run.receiver("late", report=late.append), run.versions[8]), run.versions[8])
    assert [list(figure.num_bytes) for figure in late] == [["full"]]


@pytest.mark.parametrize("has", [1, 3, 5])
def test_who_missed_an_anchor_goes_through_it_by_what_changed(run, has):
    for _ in range(7):  # versions 0 and 4 are full
        run.publish()
    figures = list[ReceiveFigures]()
    receiver = run.receiver(report=figures.append)
    fetch(receiver, run.versions[has])
    figures.clear()
    run.check(fetch(receiver, run.versions[6]), run.versions[6])
    assert [(list(figure.num_bytes), figure.num_applied) for figure in figures] == [(["delta"], 6 - has)]


def test_an_anchor_is_taken_whole_where_what_changed_since_weighs_more(run):
    first = run.publish()
    receiver, figures = run.receiver(report=lambda found: figures.append(found)), list[ReceiveFigures]()
    fetch(receiver, first)
    for _ in range(4):
        run.publish(num_changed=100_000)
    fetch(receiver, run.versions[4])
    assert [list(figure.num_bytes) for figure in figures] == [["full"], ["full"]]


def test_the_first_version_comes_whole(run):
    figures: list[ReceiveFigures] = []
    version = run.publish()
    here = fetch(run.receiver(report=figures.append), version)
    run.check(here, version)
    assert set(read(here)) == set(run.tensors[version.digest])
    (told,) = figures
    assert (told.number, told.num_applied, set(told.num_bytes)) == (0, 1, {"full"})
    assert told.num_bytes["full"] == manifest_of(run, version).num_coded_bytes


def test_who_follows_fetches_what_changed(run):
    figures: list[ReceiveFigures] = []
    receiver = run.receiver(report=figures.append)
    for _ in range(3):
        version = run.publish()
        run.check(fetch(receiver, version), version)
    assert [told.num_applied for told in figures] == [1, 1, 1]
    assert [set(told.num_bytes) for told in figures] == [{"full"}, {"delta"}, {"delta"}]
    assert figures[2].num_bytes["delta"] < figures[0].num_bytes["full"] / 10


def test_who_joins_late_takes_the_newest_anchor_and_the_chain_behind_it(run):
    for _ in range(7):
        version = run.publish()
    figures: list[ReceiveFigures] = []
    sources = Faulty(run.store)
    run.check(fetch(run.receiver(sources=sources, report=figures.append), version), version)
    assert figures[0].num_applied == 3
    assert figures[0].num_bytes.total() == sum(manifest_of(run, each).num_coded_bytes for each in run.versions[4:])
    assert [number for number, _ in sources.asked if isinstance(number, int)] == [6, 5, 4]


def test_who_missed_some_goes_on_from_what_it_has(run):
    receiver = run.receiver()
    first = run.publish()
    fetch(receiver, first)
    run.publish()
    version = run.publish()
    figures: list[ReceiveFigures] = []
    receiver = run.receiver(report=figures.append)
    run.check(fetch(receiver, version), version)
    assert (figures[0].num_applied, set(figures[0].num_bytes)) == (2, {"delta"})


def test_a_version_that_is_here_is_returned_at_once_also_after_a_restart(run):
    version = run.publish()
    receiver = run.receiver()
    fetch(receiver, version)
    for again in (receiver, run.receiver(sources=Unreachable())):
        run.check(fetch(again, version), version)


def test_two_who_ask_at_a_time_fetch_once(run):
    version, sources = run.publish(), Faulty(run.store)
    receiver = run.receiver(sources=sources)

    async def both() -> list[Version]:
        return await asyncio.gather(receiver.fetch(version), receiver.fetch(version))

    one, other = asyncio.run(both())
    assert one == other
    assert len(sources.asked) == len(set(sources.asked))


def test_an_older_version_than_the_one_that_is_here_can_be_had(run):
    versions = [run.publish() for _ in range(3)]
    receiver = run.receiver()
    for version in reversed(versions):
        run.check(fetch(receiver, version), version)


# --- what is kept ---


def test_a_few_versions_are_kept_with_their_pieces_and_nothing_else(run):
    receiver = run.receiver()
    folder = receiver.cache.folder
    (folder / ".00000099-aa.draft").mkdir(parents=True)
    (folder / "pieces" / "ab").mkdir(parents=True)
    (folder / "pieces" / "ab" / f"{'ab' * 32}.part").write_bytes(b"left by a process that died")
    fetched = [fetch(receiver, run.publish()) for _ in range(6)]
    assert names(folder) == [version.path.name for version in fetched[-3:]]
    followed = [twin_of(run, manifest_of(run, version)) for version in run.versions[-3:]]
    wanted = {piece.digest for manifest in followed for piece in manifest.pieces}
    assert {path.name for path in pieces_in(folder)} == wanted
    assert len(list(folder.glob("manifests/*.json"))) == 4  # one of them is an anchor's, and one its twin's
    assert [*folder.glob(".*.draft"), *folder.glob("pieces/*/*.part")] == []


def test_another_run_s_versions_are_neither_mistaken_for_ours_nor_crowd_them_out(run, tmp_path):
    folder = run.receiver().cache.folder
    for _ in range(5):
        run.publish()
        fetch(run.receiver(), run.versions[-1])
    other = Run(tmp_path / "other")
    receiver = Receiver(folder, StoreSources(other.store), [other.key.public])
    fetched = []
    for seed in range(1, 4):
        fetched.append(fetch(receiver, other.publish(seed=seed)))
        other.check(fetched[-1], other.versions[-1])
        assert all(version.path.is_dir() for version in fetched)
    assert names(folder) == [version.path.name for version in fetched]


def test_who_is_cancelled_leaves_nothing_half_done_and_the_next_goes_on(run):
    version = run.publish()

    async def cancel_after(num_turns: int, receiver: Receiver) -> bool:
        task = asyncio.ensure_future(receiver.fetch(version))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            run.check(await receiver.fetch(version), version)
            return True
        return False

    async def all_moments() -> None:
        num_turns = 0
        while await cancel_after(num_turns, run.receiver(f"worker{num_turns}")) and num_turns < 60:
            num_turns += 1
        assert num_turns > 5

    asyncio.run(all_moments())
