"""Each law is broken by hand, once, and `verify` must say so in words."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from ledger_run import answer, claim, eval_groups, full_step, handed, new_groups, score_all, version, work

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Scored
from offbeat.ledger.verify import RULES
from offbeat.trajectory import Reward


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with something of everything: trained, claimed, undone, re-issued, failed, evaluated, begun and open."""
    path = tmp_path_factory.mktemp("sound") / "ledger.sqlite"
    with Ledger(path, LedgerTerms(min_group=2, max_attempts=1)) as ledger:
        ledger.publish(version(0, 0))
        for step in range(3):
            full_step(ledger, step, size=3)
        ledger.reconcile(1, 1)
        ledger.publish(version(4, 1, 1))
        ledger.commit(1, version(5, 2, 4))
        ledger.admit(new_groups(ledger, 1, size=3, require_version=5))
        work(ledger, 5)
        score_all(ledger, failing=[ledger.unscored(9)[0].task])
        claim(ledger, 2, 3, 0)
        ledger.admit(new_groups(ledger, 2, size=3, require_version=5))
        lost = ledger.lease("w", 4, 5)
        for task in lost[:2]:
            ledger.fail("w", task.id, task.fence, "engine")
        ledger.admit(eval_groups(1, require_version=5))
        work(ledger, 5, capacity=2)
        score_all(ledger)
        work(ledger, 5, capacity=1)
        ledger.admit(new_groups(ledger, 1, size=3, require_version=5))
        begun = ledger.lease("w", 1, 5)[0]
        ledger.submit([handed(answer(begun, [5], end=None), "w", begun.fence)])
        assert ledger.verify().violations == ()
    return path


def edited(sound: Path, folder: Path, sql: str) -> tuple[str, ...]:
    """The violations found after an edit by hand, with everything switched off that would have prevented it."""
    path = folder / "ledger.sqlite"
    path.write_bytes(sound.read_bytes())
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA ignore_check_constraints = ON; {sql}")
    connection.close()
    with Ledger(path) as ledger:
        return ledger.verify().violations


TRAINED = "(SELECT id FROM groups WHERE state = 'trained' LIMIT 1)"
DROPPED = "(SELECT id FROM groups WHERE reason = 'abandoned' LIMIT 1)"
REISSUED = "(SELECT id FROM groups WHERE reissue_of IS NOT NULL AND retry = 0 LIMIT 1)"
OPEN = "(SELECT id FROM groups WHERE state = 'open' AND purpose = 'train' LIMIT 1)"
SCORED = "(SELECT m.task FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.state = 'trained' LIMIT 1)"
LEASED = "(SELECT id FROM tasks WHERE state = 'leased' LIMIT 1)"

EDITS = {
    "trajectory lost": (f"DELETE FROM trajectories WHERE task = {SCORED}", "in state scored, but has 0 trajectories"),
    "trajectory doubled": (
        f"INSERT INTO trajectories SELECT NULL, task, 1, digest, ended_by, num_tokens, num_sampled_tokens, "
        "num_turns, wait_ms, claimed, worker, fence, accepted_at, pruned, body FROM trajectories "
        f"WHERE task = {SCORED}",
        "has 2 trajectories",
    ),
    "answered task opened": (
        f"UPDATE tasks SET state = 'open' WHERE id = {SCORED}",
        "in state open, but has 1 trajectories",
    ),
    "reward lost": (f"DELETE FROM rewards WHERE task = {SCORED}", "contradicts its stored reward (None)"),
    "reward changed": (
        f"UPDATE rewards SET value = value + 1 WHERE task = {SCORED}",
        "was changed after it was stored",
    ),
    "part of a reward changed": (
        f"UPDATE rewards SET parts = replace(parts, '\"position\":-1', '\"position\":0') WHERE task = {SCORED}",
        "was changed after it was stored: its digest differs",
    ),
    "error of a failure changed": (
        "UPDATE rewards SET error = 'another' WHERE error IS NOT NULL",
        "was changed after it was stored: its digest differs",
    ),
    "reward of a failure": (
        "UPDATE rewards SET value = 0.0, error = NULL WHERE error IS NOT NULL",
        "in state failed (reason reward), which contradicts its stored reward (0.0)",
    ),
    "unfinished task in an ended group": (
        f"UPDATE tasks SET state = 'accepted' WHERE id = {SCORED}",
        "is accepted, but its group is trained",
    ),
    "task dropped alone": (f"UPDATE tasks SET state = 'dropped', reason = 'x' WHERE id = {LEASED}", "was dropped, but"),
    "task failed for nothing": (
        f"UPDATE tasks SET state = 'failed', reason = 'x' WHERE id = {LEASED}",
        "ended as failed (x) without a failed attempt",
    ),
    "task lost": (f"DELETE FROM tasks WHERE id = {LEASED}", "has 2 tasks instead of 3"),
    "member renumbered": (f"UPDATE tasks SET member = 7 WHERE id = {LEASED}", "their numbers are not 0 to 3 - 1"),
    "sum of tasks": (
        f"UPDATE groups SET num_open = num_open + 1 WHERE id = {OPEN}",
        "the states of its tasks give other counts",
    ),
    "sum of tokens": (
        f"UPDATE groups SET num_sampled_tokens = 1000 WHERE id = {TRAINED}",
        "trajectories with 1000 tokens, but",
    ),
    "group left open": (
        "UPDATE groups SET state = 'open', batch = NULL WHERE state = 'claimed'",
        "is still open, though all of its members have ended",
    ),
    "nothing scored": (f"UPDATE groups SET num_scored = 0 WHERE id = {TRAINED}", "but has no scored member"),
    "trained without its batch": (
        f"UPDATE groups SET batch = NULL WHERE id = {TRAINED}",
        "the state of its batch is None",
    ),
    "evaluation trained": (
        "UPDATE groups SET state = 'ready' WHERE purpose = 'eval'",
        "has purpose eval, but is in state ready",
    ),
    "ordinal trained twice": (
        f"DROP INDEX groups_living; UPDATE groups SET state = 'trained', reason = NULL WHERE id = {DROPPED}",
        "has 2 groups that are not dropped",
    ),
    "prompt lost": (
        f"DROP INDEX groups_drawn; UPDATE groups SET reissue_of = NULL WHERE id = {REISSUED}",
        "was dropped as abandoned, but its prompt was never issued again",
    ),
    "signal dropped": (
        "UPDATE groups SET reason = 'no_signal', dropped_at_step = 2 WHERE reason = 'abandoned'",
        "was dropped for equal rewards, but its 3 rewards differ",
    ),
    "no signal, but issued again": (
        f"UPDATE groups SET reason = 'no_signal', dropped_at_step = 2 WHERE id = {DROPPED}",
        "was dropped for equal rewards, but its prompt was issued again as group",
    ),
    "re-issue of a living group": (
        f"DROP INDEX groups_reissued; UPDATE groups SET reissue_of = {TRAINED} WHERE id = {REISSUED}",
        "which is trained, not dropped",
    ),
    "re-issue with another seed": (
        f"UPDATE groups SET seed = seed + 1 WHERE id = {REISSUED}",
        "but differs from it in prompt, ordinal, size",
    ),
    "re-issue of another prompt": (
        f"UPDATE groups SET prompt = x'00000000' WHERE id = {REISSUED}",
        "but differs from it in prompt, ordinal, size",
    ),
    "wrong step required": (
        f"UPDATE groups SET require_step = 0 WHERE id = {OPEN}",
        "requires step 0, but names version 5",
    ),
    "abandoned version required": (
        f"UPDATE groups SET require_version = 2 WHERE id = {OPEN}",
        "but names version 2 (step 2), which is of another step or abandoned",
    ),
    "ordinal skipped": ("UPDATE groups SET ordinal = 99 WHERE ordinal = 0", "an ordinal is missing"),
    "sibling renumbered": (
        "UPDATE groups SET sibling = 1 WHERE ordinal = 0",
        "the 1 groups of prompt 0 of source 'sums' are not siblings 0 to 1 - 1",
    ),
    "cursor moved": ("UPDATE sources SET drawn = drawn + 1", "prompts drawn from source 'sums', but the groups of"),
    "cursor lost": ("DELETE FROM sources", "from source 'sums', but the data cursor has no entry for it"),
    "trained twice": (
        "INSERT INTO batch_members SELECT (SELECT id FROM batches WHERE state = 'claimed'), m.task, 0, 0, 0, 0 "
        "FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.step = 0",
        "is in 2 batches that were not undone",
    ),
    "foreign member": (
        f"UPDATE batch_members SET task = {LEASED} WHERE task = {SCORED}",
        "but its group is not, or the task is not scored",
    ),
    "member left out": (
        f"DELETE FROM batch_members WHERE task = {SCORED}",
        "was scored, but is missing from",
    ),
    "old tokens trained": (
        "UPDATE segments SET version = 0 WHERE task IN (SELECT m.task FROM batch_members m JOIN batches b "
        "ON b.id = m.batch WHERE b.step = 1)",
        "and max_staleness 0 give 0, ",
    ),
    "abandoned tokens trained": (
        f"UPDATE segments SET version = 3 WHERE task = {SCORED}",
        "tokens count as trained or left out by an audit, 0 as stale, 0 as abandoned, but their versions",
    ),
    "scored too late": (
        "UPDATE batches SET last_reward = 0 WHERE step = 0",
        "is in the batch of step 0, but was scored after the batch was claimed",
    ),
    "sum of a batch": ("UPDATE batches SET num_trained_tokens = 1", "differ from the sums over its members"),
    "oldest token": (
        "UPDATE batches SET max_staleness = 1, bound = 1 WHERE step = 1",
        "has staleness 0, but the batch records 1",
    ),
    "bound passed": ("UPDATE batches SET max_staleness = 3 WHERE step = 1", "staleness 3, above its max_staleness 0"),
    "trained from elsewhere": (
        "UPDATE batches SET from_version = 0 WHERE step = 1",
        "was trained from version 0",
    ),
    "gave another version": ("UPDATE batches SET to_version = 3 WHERE step = 1", "produced version 3 (step 3"),
    "commit lost in between": (
        "UPDATE batches SET to_version = NULL WHERE step = 0 AND state = 'trained'",
        "but the batch of a later step already has a version to train from",
    ),
    "step skipped": ("UPDATE batches SET step = 7 WHERE state = 'claimed'", "but the steps between them have none"),
    "batch without groups": (
        "UPDATE groups SET batch = NULL WHERE batch = (SELECT id FROM batches WHERE step = 0)",
        "the batch of step 0 contains no group",
    ),
    "version jumps": (
        "UPDATE versions SET step = 9 WHERE number = 5",
        "version 5 of step 9 has parent",
    ),
    "version on an abandoned one": (
        "UPDATE versions SET abandoned = 1 WHERE number = 4",
        "has parent 4 of step 1, but",
    ),
    "version without a parent": ("UPDATE versions SET parent = NULL WHERE number = 4", "has no parent, but is not the"),
    "two sets of weights": (
        "UPDATE versions SET digest = 'x' WHERE number = 4",
        "of step 1 have different weights",
    ),
    "version goes back": (
        "UPDATE versions SET abandoned = 0 WHERE number = 3",
        "version 4 of step 1 is not abandoned, but follows version 3 of the later step 3",
    ),
    "version never published": (
        f"UPDATE segments SET version = 77 WHERE task = {SCORED}",
        "was sampled from version 77",
    ),
    "version of another step": (
        "UPDATE segments SET version = 0 WHERE task IN (SELECT t.id FROM tasks t JOIN groups g ON g.id = t.group_id "
        "WHERE g.state = 'claimed')",
        "requires step 2, but was sampled from version 0 of step 0",
    ),
    "segment shortened": (
        f"UPDATE segments SET num_tokens = 90 WHERE task = {SCORED}",
        "its segments have 90 and 90",
    ),
    "segments with a gap": (
        f"UPDATE segments SET start = 3 WHERE task = {SCORED}",
        "gap or an overlap before position 3",
    ),
    "bytes changed": (f"UPDATE trajectories SET body = x'80' WHERE task = {SCORED}", "its digest differs"),
    "told otherwise": (
        f"UPDATE trajectories SET ended_by = 'length' WHERE task = {SCORED}",
        "differs from the tables",
    ),
    "beginning of an ended task": (
        f"UPDATE partials SET task = {SCORED}",
        "is scored, but a partial trajectory is still stored for it to continue",
    ),
    "beginning lost from sight": (
        "UPDATE partials SET state = 'continued', body = NULL",
        "no later partial or trajectory continues it",
    ),
    "beginning in an abandoned version": (
        "UPDATE partials SET last_version = 3",
        "ends with tokens of version 3, which is abandoned",
    ),
    "beginning changed": ("UPDATE partials SET body = x'80'", "was changed after it was submitted: its digest differs"),
    "beginning told otherwise": (
        "UPDATE partials SET first_version = 0",
        "differs from the tables in its task",
    ),
    "failure without a lease": (
        f"UPDATE tasks SET num_failures = 9 WHERE id = {LEASED}",
        "counts 9 failed attempts, but was leased only 1 times",
    ),
    "failure that nobody knows": (
        f"UPDATE tasks SET num_failures = 1 WHERE id = {LEASED}",
        "counts 1 failed attempts, but 0 failures that count against it are stored",
    ),
    "segment of a stranger": (
        f"UPDATE segments SET worker = 'stranger' WHERE task = {SCORED}",
        "is recorded for worker stranger, but that worker submitted no answer long enough to contain it",
    ),
    "pruned and not counted": (
        f"UPDATE trajectories SET pruned = 1, body = NULL WHERE task = {SCORED}",
        "counts 0 pruned trajectories, but 1 are pruned",
    ),
    "pruned too soon": (
        "UPDATE trajectories SET pruned = 1, body = NULL WHERE task IN (SELECT t.id FROM tasks t JOIN groups g "
        "ON g.id = t.group_id WHERE g.state = 'claimed')",
        "was pruned, but its group",
    ),
    "seed changed": (
        f"UPDATE tasks SET seed = seed + 1 WHERE id = {LEASED}",
        "is not the one derived from the seed of its group",
    ),
    "row without its parent": (
        f"UPDATE tasks SET group_id = 999 WHERE id = {LEASED}",
        "refers to a missing row of table groups",
    ),
    "tokens vanish": (
        "UPDATE batches SET num_trained_tokens = num_trained_tokens - 1 WHERE step = 0",
        "are accounted for: trained",
    ),
    "trajectories vanish": (
        f"UPDATE groups SET num_trajectories = num_trajectories - 1 WHERE id = {TRAINED}",
        "trajectories were accepted, but",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_by_hand_is_found(sound: Path, tmp_path: Path, name: str):
    sql, words = EDITS[name]
    violations = edited(sound, tmp_path, sql)
    assert any(words in violation for violation in violations), violations


def test_every_rule_is_broken_by_one_of_the_edits(sound: Path, tmp_path: Path):
    broken = set()
    for sql, _ in EDITS.values():
        path = tmp_path / "ledger.sqlite"
        path.write_bytes(sound.read_bytes())
        connection = sqlite3.connect(path)
        connection.executescript(f"PRAGMA ignore_check_constraints = ON; {sql}")
        broken |= {rule.message for rule in RULES if connection.execute(rule.query).fetchone()}
        connection.close()
        path.unlink()
    assert broken == {rule.message for rule in RULES}


def test_a_law_broken_everywhere_is_told_in_a_few_lines(sound: Path, tmp_path: Path):
    violations = edited(sound, tmp_path, "UPDATE tasks SET seed = 5")
    assert len([v for v in violations if "is not the one derived from the seed" in v]) == 5
    assert any("more like this" in violation for violation in violations)


def test_a_damaged_file_is_found(sound: Path, tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    content = bytearray(sound.read_bytes())
    query = "SELECT rootpage FROM sqlite_master WHERE name = 'tasks_failed'"
    (page,) = sqlite3.connect(sound).execute(query).fetchone()
    content[(page - 1) * 4096 + 8 : page * 4096] = b"\xff" * (4096 - 8)
    path.write_bytes(bytes(content))
    with Ledger(path) as ledger:
        report = ledger.verify()
    assert not report.holds
    assert all("the file is damaged" in violation for violation in report.violations)


def test_bodies_may_be_left_out(sound: Path, tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(sound.read_bytes())
    with Ledger(path) as ledger:
        ledger.execute("UPDATE trajectories SET body = x'00'")
        assert ledger.verify(with_bodies=False).holds
        assert not ledger.verify().holds


def test_a_reward_of_minus_zero_is_the_one_that_was_stored(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 1))
        work(ledger, 0)
        ledger.score([Scored(waiting.task, [Reward(-0.0)]) for waiting in ledger.unscored(9)])
        assert ledger.verify().holds
