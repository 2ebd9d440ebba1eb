"""What new versions cost a worker, summed up over its life, for whoever watches the run."""

from __future__ import annotations

from collections import defaultdict

from offbeat.rollout.engine import Engine
from offbeat.weights.receive import Figures


class WorkerFigures:
    """Sums that only grow; the names are those of the coordinator's metrics."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._sums: dict[str, float] = defaultdict(float)

    def follow(self, engine: Engine) -> None:
        """From now on this engine generates; what the one before it cost stays in the sums."""
        self._sums["still_s"] = self._still_s
        self._engine = engine

    def fetched(self, figures: Figures) -> None:
        """A version was brought to this machine."""
        self._sums["versions"] += 1
        self._sums["fetch_s"] += figures.fetch_s
        self._sums["apply_s"] += figures.apply_s
        for kind, num_bytes in figures.num_bytes.items():
            self._sums[f"{kind}_bytes"] += num_bytes

    def told(self) -> dict[str, float]:
        return {**self._sums, "still_s": self._still_s}

    @property
    def _still_s(self) -> float:
        return self._sums["still_s"] + (self._engine.seconds_still if self._engine else 0.0)
