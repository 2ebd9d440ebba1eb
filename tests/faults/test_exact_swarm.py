"""With `exact`, any number of workers, killed at any moment, end in the very weights of a run in one process."""

import os
import random
import time

import pytest
from shared_results import shared
from supervised_runs import TINY, check_whole, final_digest

from benchmarks.common.supervised import Supervised

NUM_STEPS = 20
EXACT = (*TINY, "--run.exact=true", f"--run.steps={NUM_STEPS}", "--checkpoint.every=3", "--rollout.lease-s=2")
KILLS = {
    1: ["worker-1"] * 4,
    2: ["worker-1", "coordinator", "worker-2", "trainer", "worker-1", "coordinator"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """The last weights of a run in one process."""

    def train() -> str:
        run = Supervised(tmp_path_factory.mktemp("alone"), *EXACT)
        assert run.finish() == ""
        check_whole(run.run, NUM_STEPS)
        return final_digest(run.run)

    return shared(tmp_path_factory, "alone", train)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", list(KILLS))
def test_kills_at_random_moments_change_no_bit(num_workers, alone, tmp_path):
    rng = random.Random(os.environ.get("OFFBEAT_TEST_SEED", f"{num_workers}"))
    run = Supervised(tmp_path, *EXACT, f"--rollout.workers={num_workers}")
    for kill, name in enumerate(KILLS[num_workers]):
        run.until_step(1 + kill * NUM_STEPS // (len(KILLS[num_workers]) + 1))
        time.sleep(rng.uniform(0.0, 0.2))  # into the middle of something
        run.kill(name)
    assert run.finish() == ""
    check_whole(run.run, NUM_STEPS)
    assert final_digest(run.run) == alone
