"""The chaos benchmark's short form: a few kills of every role under load, a cut line and doubled calls."""

import asyncio

import pytest

from benchmarks.chaos.audit import audit
from benchmarks.chaos.scenario import BOUND, chaos

NUM_KILLS = 6


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("partial", [False, True], ids=["overlap", "partial"])
def test_a_run_under_random_faults_loses_nothing_doubles_nothing_and_keeps_its_bound(tmp_path, partial):
    made, found, _ = asyncio.run(chaos(tmp_path, NUM_KILLS, seed=2, partial=partial))
    assert (found.lost, found.doubled, found.violations) == ((), (), ())
    assert found.max_staleness <= BOUND
    assert made.witnessed.total() == NUM_KILLS
    assert made.num_cuts + made.num_freezes >= 1
    assert made.proxy.seen.acknowledged, "nothing crossed the line"
    assert found.num_partials > 0 or not partial, "nothing was handed back"

    (first, digest), *_ = made.proxy.seen.acknowledged.items()
    run = tmp_path / "runs" / "a"
    assert audit(run, {first: digest[::-1], (10**9, 1): digest}).lost == (
        f"task {first[0]}, fence {first[1]}",
        f"task {10**9}, fence 1",
    ), "the audit does not see what is missing"
