from offbeat.rules.presence import Presence


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_who_was_heard_of_lately_is_present_until_it_leaves_or_falls_silent():
    clock = Clock()
    presence = Presence(clock)
    presence.hear("a", 8)
    clock.now_s += 5
    presence.hear("b", 2)
    assert presence.present(within_s=10) == ["a", "b"]
    clock.now_s += 6
    assert presence.present(within_s=10) == ["b"]
    presence.left("b")
    assert presence.present(within_s=10) == []


def test_a_workers_slots_are_the_most_that_it_ever_asked_for():
    presence = Presence(Clock())
    presence.hear("a", 8)
    presence.hear("a", 3)
    presence.hear("a")
    presence.hear("b", 4)
    assert presence.total_slots(within_s=10) == 12


def test_a_worker_has_restarted_when_it_speaks_from_another_life():
    presence = Presence(Clock())
    assert not presence.has_restarted("a", "one")  # we may have been restarted ourselves
    assert not presence.has_restarted("a", "one")
    assert presence.has_restarted("a", "two")
    assert not presence.has_restarted("a", "two")
    assert not presence.has_restarted("b", "two")


def test_a_hundred_thousand_workers_that_came_and_left_leave_nothing_behind():
    presence = Presence(Clock())
    for number in range(100_000):
        name = f"w{number}"
        presence.hear(name, 4)
        presence.has_restarted(name, "one")
        presence.figures[name] = {"bytes": 1.0}
        presence.left(name)
    assert [len(map) for map in vars(presence).values() if isinstance(map, dict)] == [0] * 4


def test_who_is_silent_for_too_long_is_named_until_it_is_forgotten():
    clock = Clock()
    presence = Presence(clock)
    presence.hear("gone")
    clock.now_s += 50
    presence.hear("leaving")
    presence.figures["leaving"] = {}
    clock.now_s += 50
    presence.hear("here")
    assert presence.silent(for_s=60) == ["gone"]
    assert presence.silent(for_s=20) == ["gone", "leaving"]
    presence.left("gone")
    assert presence.silent(for_s=60) == []


def test_figures_are_those_that_a_worker_told_last():
    presence = Presence(Clock())
    presence.hear("b")
    presence.figures["b"] = {"bytes": 1.0}
    presence.hear("a")
    presence.figures["a"] = {"bytes": 1.0}
    presence.hear("a")
    presence.figures["a"] = {"bytes": 2.0}
    presence.left("b")
    assert presence.figures == {"a": {"bytes": 2.0}}
