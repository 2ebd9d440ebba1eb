"""What a worker adds to its engine's requests, and what it remembers of its engines."""

from dataclasses import dataclass

import numpy as np
import pytest
from fake_coordinator import a_task

from offbeat.engines.protocol import KvMode
from offbeat.worker.worker import WorkerMetrics, begin, request_for


@pytest.mark.parametrize(
    "kv, lag, told", [(KvMode.SAME, 3, 0), (KvMode.REFILL, 3, 0), (KvMode.STALE, 3, 3), (KvMode.STALE, 1, 1)]
)
def test_a_request_says_which_keys_and_values_will_do(kv, lag, told):
    request = request_for(begin(a_task(1)), kv, lag)
    assert (request.kv, request.kv_lag) == (kv, told)
    assert np.array_equal(request.tokens, a_task(1).prompt)


@dataclass
class Still:
    seconds_still: float


def test_time_that_engines_stood_still_adds_up_over_their_lives():
    metrics = WorkerMetrics()
    assert metrics.totals() == {"still_s": 0.0}
    first, second = Still(1.0), Still(0.0)
    metrics.follow(first)
    first.seconds_still = 3.0
    assert metrics.totals()["still_s"] == 3.0
    metrics.follow(second)
    second.seconds_still = 0.5
    assert metrics.totals()["still_s"] == 3.5
    metrics.follow(Still(0.0))
    assert metrics.totals()["still_s"] == 3.5
