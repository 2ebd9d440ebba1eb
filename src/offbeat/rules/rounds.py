"""Rounds: which workers may get training tasks if generation stops once a batch is complete.

A round is the generation of one batch. It begins with a new version, by whose number it is named, and ends when the
trainer claims the batch.
"""

from __future__ import annotations


class RoundMembers:
    """Records, for each worker, its last round and the version that it served when it leased tasks of this round."""

    def __init__(self, *, in_rounds: bool):
        self._in_rounds = in_rounds
        self._took_part: dict[str, tuple[int, int | None]] = {}

    def may_join(self, worker: str, number: int | None, have_version: int | None) -> bool:
        """Whether a worker that serves `have_version` may get training tasks in round `number`.

        Evaluation tasks are not affected. In a run without rounds, every worker may get training tasks; between rounds
        (`number` is None), no worker may. A worker that still serves the version with which it took part in an earlier
        round must first load another version. That version need not be the newest: otherwise a worker with a slow
        network, which receives every version too late, would never work.
        """
        if not self._in_rounds:
            return True
        if number is None:
            return False
        before, version = self._took_part.get(worker, (number, None))
        return before == number or have_version in (number, None) or have_version != version

    def joined(self, worker: str, number: int | None, have_version: int | None) -> None:
        if number is not None:
            self._took_part[worker] = (number, have_version)

    def left(self, worker: str) -> None:
        self._took_part.pop(worker, None)
