from offbeat.serve.presence import Presence


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


def test_a_worker_begins_anew_when_it_speaks_from_another_life():
    presence = Presence(Clock())
    assert not presence.begins_anew("a", "one")  # we may have been restarted ourselves
    assert not presence.begins_anew("a", "one")
    assert presence.begins_anew("a", "two")
    assert not presence.begins_anew("a", "two")
    assert not presence.begins_anew("b", "two")
