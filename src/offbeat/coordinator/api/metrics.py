"""Metrics for Prometheus: contents of the ledger, leases, and calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from offbeat.ledger.records import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CallFigures:
    """Number of calls by route and status, and their total time by route."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[str] = Counter()

    def add(self, route: str, status: int, seconds: float) -> None:
        self._counts[route, status] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]  # a Counter adds floats as well

    def lines(self) -> Iterator[str]:
        yield "# TYPE offbeat_requests_total counter"
        for (route, status), count in sorted(self._counts.items()):
            yield f'offbeat_requests_total{{route="{route}",status="{status}"}} {count}'
        yield "# TYPE offbeat_request_seconds_total counter"
        for route, seconds in sorted(self._seconds.items()):
            yield f'offbeat_request_seconds_total{{route="{route}"}} {seconds:.6f}'


def text(
    counts: Counts, leased: Mapping[str, int], calls: CallFigures, workers: Mapping[str, Mapping[str, float]]
) -> str:
    """Returns the page of metrics: `counts` of the ledger's contents, number of leases by worker (`leased`), `calls` of
    the API, and each worker's latest figures (`workers`), which are totals since it started."""
    lines = [
        "# TYPE offbeat_max_staleness_trained gauge",
        f"offbeat_max_staleness_trained {counts.max_staleness_trained}",
        "# TYPE offbeat_versions gauge",
        f"offbeat_versions {counts.num_versions}",
        *_by_state("offbeat_trajectories", counts.trajectories),
        *_by_state("offbeat_tokens", counts.tokens),
        *_by_state("offbeat_groups", counts.groups),
        *_by_state("offbeat_dropped_groups", counts.dropped_groups),
        *_by_state("offbeat_failed_tasks", counts.failed_tasks),
        "# TYPE offbeat_leases gauge",
        *(f'offbeat_leases{{worker="{_escaped(worker)}"}} {count}' for worker, count in sorted(leased.items())),
        *calls.lines(),
        *_worker_lines(workers),
    ]
    return "\n".join(lines) + "\n"


def _worker_lines(workers: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield "# TYPE offbeat_worker_weights_total counter"
    for worker, figures in sorted(workers.items()):
        for figure, value in sorted(figures.items()):
            labels = f'worker="{_escaped(worker)}",figure="{_escaped(figure)}"'
            yield f"offbeat_worker_weights_total{{{labels}}} {value:.6f}"


def _by_state(name: str, counts: Any) -> Iterator[str]:
    """Yields the lines of metric `name`: one per state, or one per reason if a state's count is split by reason."""
    yield f"# TYPE {name} gauge"
    for state, value in (asdict(counts) if is_dataclass(counts) else dict(counts)).items():  # type: ignore[arg-type]
        if isinstance(value, Mapping):
            for reason, count in value.items():
                yield f'{name}{{state="{state}",reason="{_escaped(reason)}"}} {count}'
        else:
            yield f'{name}{{state="{_escaped(state)}"}} {value}'


def _escaped(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
