import math

import numpy as np
import pytest

from offbeat.environments.latency import LAWS, find_law
from offbeat.errors import UserError

COUNT = 20_000


def drawn(law):
    return np.array([law.seconds(episode, 3) for episode in range(COUNT)])


def test_coding_has_the_shares_of_real_sessions():
    waits = drawn(find_law("coding"))
    bins = np.histogram(waits, [0, 1, 10, 60, math.inf])[0] / COUNT
    assert bins == pytest.approx([0.61, 0.27, 0.09, 0.03], abs=0.015)
    assert waits[waits > 60].sum() / waits.sum() > 0.6


def test_a_wait_depends_on_episode_and_turn_and_not_on_arrival():
    law, again = find_law("search", seed=7), find_law("search", seed=7)
    places = [(episode, turn) for episode in range(20) for turn in range(5)]
    waits = {place: law.seconds(*place) for place in places}
    assert {place: again.seconds(*place) for place in reversed(places)} == waits
    assert len(set(waits.values())) == len(places)
    assert find_law("search", seed=8).seconds(0, 0) != waits[0, 0]


@pytest.mark.parametrize("cut_s", [10.0, 60.0, math.inf])
@pytest.mark.parametrize("name", ["search", "python", "constant", "coding"])
def test_mean_is_that_of_the_waits(name, cut_s):
    law = find_law(name, cut_s=cut_s)
    if name == "coding" and math.isinf(cut_s):
        assert law.mean_s == pytest.approx(14.4, abs=0.1)  # a few waits of hours decide the mean of a sample
    else:
        assert drawn(law).mean() == pytest.approx(law.mean_s, rel=0.06)


def test_scale_shortens_and_a_cut_is_counted():
    law, hundredth = find_law("coding", cut_s=60), find_law("coding", cut_s=60, scale=0.01)
    assert drawn(hundredth) == pytest.approx(0.01 * drawn(law))
    cut = [law.is_cut(episode, 3) for episode in range(COUNT)]
    assert np.mean(cut) == pytest.approx(0.032, abs=0.005)
    assert all(law.seconds(episode, 3) == 60 for episode in range(COUNT) if cut[episode])


def test_constant_is_constant_and_an_unknown_law_names_the_others():
    assert {find_law("constant", scale=2).seconds(episode, 0) for episode in range(9)} == {2.0}
    with pytest.raises(UserError, match="did you mean 'coding'"):
        find_law("codng")
    assert set(LAWS) == {"coding", "search", "python", "constant"}
