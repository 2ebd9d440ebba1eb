"""How runs are compared by held-out reward over seconds, and how their versions are kept."""

import pytest

from benchmarks.reward_over_seconds.__main__ import Keeper, Point, area, bars_of, seconds_to

RISING = [Point(0, 0.0, 0.1), Point(10, 50.0, 0.3), Point(20, 90.0, 0.5)]
SLOWER = [
    Point(step, 2 * seconds, reward) for step, seconds, reward in [(0, 0.0, 0.1), (10, 50.0, 0.3), (20, 90.0, 0.5)]
]


@pytest.mark.parametrize("level, seconds", [(0.2, 25.0), (0.3, 50.0), (0.4, 70.0), (0.5, 90.0), (0.6, None)])
def test_a_level_is_reached_where_the_line_between_two_versions_crosses_it(level, seconds):
    assert seconds_to(level, RISING) == (seconds and pytest.approx(seconds))


def test_the_first_crossing_counts():
    assert seconds_to(0.2, [Point(0, 0.0, 0.1), Point(1, 10.0, 0.3), Point(2, 20.0, 0.1), Point(3, 30.0, 0.3)]) == 5.0


def test_the_area_is_the_mean_over_samples_whatever_the_seconds():
    assert area(RISING) == pytest.approx(0.3) == area(SLOWER)


def test_runs_are_compared_seed_by_seed():
    curves = {"overlap": {1: RISING, 2: RISING}, "alternate": {1: SLOWER}, "TRL": {2: SLOWER, 3: SLOWER}}
    bars = bars_of(curves, 0.4, quick=False)
    assert bars["seconds to the level, over TRL's"].value == 0.5 == bars["seconds to the level, over alternate's"].value
    assert bars["area over samples, over alternate's"].value == 1.0
    assert bars["final reward above TRL's"].value == 0.0


def test_a_level_that_one_run_misses_gives_no_ratio():
    assert (
        bars_of({"overlap": {1: RISING}, "TRL": {1: SLOWER[:2]}}, 0.4, quick=False)[
            "seconds to the level, over TRL's"
        ].value
        is None
    )


def test_a_version_is_kept_after_its_folder_is_gone(tmp_path):
    weights = tmp_path / "weights"
    with Keeper(weights, tmp_path / "kept", [1, 3]) as keeper:
        for step in (1, 2, 3):
            folder = weights / f"{step:08d}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_text(str(step))
            keeper._look()
            (folder / "model.safetensors").unlink()
            folder.rmdir()
    assert {file.name: file.read_text() for file in (tmp_path / "kept").iterdir()} == {
        "00000001.safetensors": "1",
        "00000003.safetensors": "3",
    }
    assert not keeper.missing
