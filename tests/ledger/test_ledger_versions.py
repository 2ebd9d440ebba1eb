"""Which versions somebody may still ask for, and what stands in a version's row."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_run import answer, claim, new_groups, version

from offbeat.ledger.errors import Conflict
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Scored, Submission
from offbeat.trajectory import Reward
from offbeat.weights.version import Version

BOUND = 8


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(max_staleness=BOUND)) as opened:
        opened.publish(version(0, 0))
        yield opened
        assert opened.verify().violations == ()


def train(ledger: Ledger, step: int) -> None:
    """A step on a group of its own; version and step have the same number."""
    ledger.admit(new_groups(ledger, 1, require_version=None))
    tasks = ledger.lease("w", 2, step)
    ledger.submit([Submission(answer(task, [step]), "w", task.fence) for task in tasks])
    ledger.score([Scored(task.id, [Reward(1.0)]) for task in tasks])
    assert claim(ledger, step, 1, BOUND, in_order=False)
    ledger.commit(step, version(step + 1, step + 1, step))


def test_with_everything_trained_the_last_two_are_needed(ledger):
    for step in range(5):
        train(ledger, step)
    assert ledger.versions_needed(checkpoint_step=5) == [4, 5]


def test_what_a_checkpoint_knows_is_needed_and_all_that_came_after(ledger):
    for step in range(5):
        train(ledger, step)
    assert ledger.versions_needed(checkpoint_step=2) == [2, 3, 4, 5]
    assert ledger.versions_needed(checkpoint_step=-1) == [4, 5]  # there is none


def test_what_a_group_was_begun_with_is_needed_until_it_is_trained(ledger):
    train(ledger, 0)
    ledger.admit(new_groups(ledger, 1, require_version=None))
    held = ledger.lease("slow", 2, 1)
    for step in range(1, 4):
        train(ledger, step)
    assert ledger.versions_needed(checkpoint_step=4) == [1, 2, 3, 4]
    ledger.submit([Submission(answer(task, [1], worker="slow"), "slow", task.fence) for task in held])
    assert ledger.versions_needed(checkpoint_step=4) == [1, 2, 3, 4]
    ledger.score([Scored(task.id, [Reward(1.0)]) for task in held])
    assert claim(ledger, 4, 1, BOUND, in_order=False)
    assert ledger.versions_needed(checkpoint_step=4) == [1, 2, 3, 4]
    ledger.commit(4, version(5, 5, 4))
    assert ledger.versions_needed(checkpoint_step=5) == [4, 5]


def test_a_version_is_known_by_its_manifest_too(ledger):
    published = replace(version(1, 0, 0), digest=version(0, 0).digest, manifest="a" * 64)
    ledger.publish(published)
    ledger.publish(published)
    assert ledger.version(1).manifest == "a" * 64
    with pytest.raises(Conflict):
        ledger.publish(replace(published, manifest="b" * 64))


def test_a_moved_run_finds_its_own_weights_and_not_those_that_it_was_copied_from(tmp_path):
    run, copy = tmp_path / "a", tmp_path / "elsewhere" / "b"
    weights = run / "weights" / "00000000"
    weights.mkdir(parents=True)
    with Ledger(run / "ledger.sqlite") as ledger:
        ledger.publish(Version(0, 0, None, "digest", weights))
        assert ledger.latest_version().path == weights
    shutil.copytree(run, copy)
    with Ledger(copy / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.latest_version().path == copy / "weights" / "00000000"


def test_weights_outside_the_runs_folder_stay_where_they_are(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.publish(Version(0, 0, None, "digest", Path("/shared/weights/0")))
        assert ledger.latest_version().path == Path("/shared/weights/0")
