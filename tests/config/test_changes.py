import pytest

from offbeat.config import Change, fixed_changes, fixed_keys, free_changes, from_dict, load, resolved


def test_an_unchanged_configuration_has_no_changes():
    assert fixed_changes(resolved(load(None)), load(None)) == []
    assert free_changes(resolved(load(None)), load(None)) == []


def test_changes_are_sorted_into_fixed_and_free():
    old = resolved(load(None, ["--run.steps=300", "--optimizer.lr=3e-4"]))
    new = load(None, ["--batch.group-size=4", "--task.level=3", "--run.steps=400", "--optimizer.lr=1e-4"])
    assert fixed_changes(old, new) == [Change("task.level", 2, 3), Change("batch.group_size", 8, 4)]
    assert free_changes(old, new) == [Change("run.steps", 300, 400), Change("optimizer.lr", 3e-4, 1e-4)]


def test_another_source_or_number_of_tasks_is_a_fixed_change():
    old = resolved(load(None))
    more = load(None, ["--task.1.source=arithmetic"])
    assert {change.key for change in fixed_changes(old, more)} >= {"task.1.source", "task.1.level"}
    other = load(None, ["--task.source=file", "--task.path=x"])
    assert Change("task.source", "arithmetic", "file") in fixed_changes(old, other)
    assert fixed_changes(resolved(more), load(None))
    assert fixed_changes(resolved(other), load(None))


def test_a_key_that_the_stored_configuration_lacks_counts_as_its_default():
    old = resolved(load(None))
    del old["loss"]["kl_coef"], old["task"][0]["tail"], old["schedule"]
    assert fixed_changes(old, load(None)) == []
    assert fixed_changes(old, load(None, ["--loss.kl_coef=0.1"])) == [Change("loss.kl_coef", 0.0, 0.1)]


def test_a_name_that_is_not_said_is_the_runs_own():
    old = resolved(load(None, ["--run.name=a"]))
    assert fixed_changes(old, load(None)) == []
    assert fixed_changes(old, load(None, ["--run.name=b"])) == [Change("run.name", "a", "b")]


def test_an_exact_run_keeps_what_decides_the_last_bits():
    old = resolved(load(None, ["--run.exact=true"]))
    other = ["--run.exact=true", "--run.threads=1", "--rollout.slots=64", "--run.steps=9"]
    assert {change.key for change in fixed_changes(old, load(None, other))} == {"run.threads", "rollout.slots"}
    assert [change.key for change in free_changes(old, load(None, other))] == ["run.steps"]


@pytest.mark.parametrize("exact", [True, False])
def test_the_fixed_keys_alone_tell_what_may_not_change(exact):
    old = from_dict({"run": {"exact": exact, "steps": 3, "threads": 1}, "schedule": {"max_staleness": 0}})
    kept = fixed_keys(old)
    assert "steps" not in kept["run"]
    assert ("threads" in kept["run"]) == exact
    assert fixed_changes(kept, old) == []
    new = from_dict({"run": {"exact": exact, "steps": 9, "threads": 2}, "batch": {"group_size": 3}})
    assert [change.key for change in fixed_changes(kept, new)] == [c.key for c in fixed_changes(resolved(old), new)]
