"""How many groups are under way: as told, or as the schedule has it."""

import pytest

from offbeat.serve.provisioning import Provisioning


@pytest.mark.parametrize("overlap", [True, False])
def test_a_number_is_in_force_as_it_was_told(overlap):
    made = Provisioning(2.5, bound=4, overlap=overlap)
    for _ in range(5):
        made.trained(still_s=9.0, step_s=10.0)
        made.began()
        assert made.factor() == 2.5


def test_where_work_overlaps_more_is_under_way_from_the_next_version_on_when_the_trainer_stood_still():
    made = Provisioning("auto", bound=3, overlap=True)
    assert made.factor() == 2.0
    made.trained(still_s=5.0, step_s=10.0)
    assert made.factor() == 2.0
    made.began()
    assert made.factor() == 3.0


@pytest.mark.parametrize("bound", [1, 2, 8])
def test_in_rounds_it_stays_within_what_the_bound_allows(bound):
    assert 1.0 < Provisioning("auto", bound, overlap=False).factor() <= bound + 1
