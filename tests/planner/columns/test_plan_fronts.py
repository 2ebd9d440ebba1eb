"""Which gangs get a column: by nodes, period, and what they keep on cards that generate too."""

from offbeat.planner.columns.gangs import fastest_first_front
from offbeat.planner.problem import Gang


def gang(name, step_s, kept_bytes=None, **nodes):
    kept = {} if kept_bytes is None else dict.fromkeys(nodes, kept_bytes)
    return Gang(name, nodes, next(iter(nodes)), step_s, publish_s=1.0, kept_bytes=kept)


def names_of(*candidates, slack=(0.02, 0.1)):
    return [one.name for one in fastest_first_front(candidates, *slack)]


def test_of_gangs_on_the_same_nodes_the_fastest_is_kept():
    assert names_of(gang("slow", 20.0, a=2), gang("fast", 10.0, a=2)) == ["fast"]


def test_more_nodes_are_worth_a_column_where_they_are_faster_by_more_than_the_cost_model_can_tell():
    one = gang("one", 99.0, a=1)  # 100 s with its publication
    assert names_of(one, gang("two", 97.1, a=2)) == ["one"]
    assert names_of(one, gang("two", 96.9, a=2)) == ["one", "two"]
    assert names_of(one, gang("beside", 97.1, a=1, b=1)) == ["one"]
    assert names_of(one, gang("two", 98.9, a=2), slack=(0.0, 0.0)) == ["one", "two"]


def test_a_gang_on_other_nodes_is_no_rival():
    assert names_of(gang("one", 10.0, a=2), gang("other", 50.0, b=1)) == ["other", "one"]
    assert names_of(gang("one", 10.0, a=2, b=1), gang("other", 50.0, a=1, b=2)) == ["one", "other"]


def test_a_gang_that_publishes_from_another_class_is_no_rival():
    one, both = gang("one", 10.0, a=1), gang("both", 10.0, b=1, a=1)
    assert names_of(one, both) == ["one", "both"]


def test_a_slower_gang_that_leaves_replicas_more_memory_is_kept():
    fat, lean = gang("fat", 10.0, 50e9, a=2), gang("lean", 20.0, 40e9, a=2)
    assert names_of(fat, lean) == ["fat", "lean"]
    assert names_of(fat, gang("hardly leaner", 20.0, 48e9, a=2)) == ["fat"]
