"""How many groups are under way: as told, or as far ahead as the trainer needs."""

from offbeat.coordinator.admission import Overlapped, Provisioning


def test_a_number_is_in_force_as_it_was_told():
    made = Provisioning(2.5)
    for step in range(5):
        made.trained(still_s=9.0, step_s=10.0)
        made.began(step, 8, [])
        assert made.factor() == made.figures()["over_provision"] == 2.5


def test_where_work_overlaps_more_is_under_way_from_the_next_version_on_when_the_trainer_stood_still():
    made = Overlapped(max_staleness=3)
    assert made.factor() == 2.0
    made.trained(still_s=5.0, step_s=10.0)
    assert made.factor() == 2.0
    made.began(1, 8, [])
    assert made.factor() == 3.0
