"""With `exact` and the embedded engine, a run on a GPU ends in the same bits, twice, and killed and resumed."""

from __future__ import annotations

import pytest
from gpu_runs import COMMON, GpuRun
from supervised_runs import final_digest

NUM_STEPS = 16
KILLED_AFTER_STEPS = (2, 7, 12)
EXACT = ("--run.exact", f"--run.steps={NUM_STEPS}", "--run.threads=1", "--checkpoint.every=3")

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_twice_and_one_killed_three_times_end_in_equal_bits(tmp_path, dtype):
    digests = []
    for name, killed_after in (("first", ()), ("second", ()), ("killed", KILLED_AFTER_STEPS)):
        folder = tmp_path / name
        folder.mkdir()
        run = GpuRun(folder, *COMMON, *EXACT, f"--model.dtype={dtype}")
        for step in killed_after:
            run.until_step(step)
            run = run.kill_everything()
        run.finish()
        digests.append(final_digest(run.run))
    assert digests[1] == digests[0], "the same run twice"
    assert digests[2] == digests[0], "killed and resumed"
