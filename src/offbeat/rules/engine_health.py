"""Health of an engine server: whether it answers, and whether it still serves the weights that were loaded into it.

Keeps tokens of unknown weights out of training. No I/O: the caller reports what it observes, and generates only while
`may_generate` is true. A server has a label (name) for its weights. An equal label alone proves nothing, because a
restarted server may use the label again for other weights.

Guarantees: generation is allowed only after a refresh, that is, a load of verified weights. After a death or an
unexpected label of the server, another refresh is needed. Reports must be made in order: a label that is read before a
refresh but reported after it makes the server stale.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

DEAD_AFTER_S = 10.0
"""Time without an answer after which a server counts as dead. A live server may be silent for seconds while it loads
weights. A longer time would keep the tasks of a dead server waiting."""


class State(StrEnum):
    """State of one server, as its worker sees it."""

    HEALTHY = "healthy"
    """Serves the version loaded last."""
    SUSPECT = "suspect"
    """Does not answer: it gets no new requests, but keeps its old ones."""
    DEAD = "dead"
    """Given up by its worker, together with all its requests."""
    STALE = "stale"
    """Serves unknown weights; a version must be loaded first."""


MOVES = {
    State.HEALTHY: {State.SUSPECT, State.DEAD, State.STALE},
    State.SUSPECT: {State.HEALTHY, State.DEAD, State.STALE},
    State.DEAD: {State.STALE},
    State.STALE: {State.HEALTHY, State.DEAD},
}
"""Allowed changes of state. DEAD to HEALTHY is missing because after a death another process may answer, with other
weights under the same label. STALE to SUSPECT is missing because from SUSPECT an answer leads to HEALTHY."""


class Health:
    """Health of one engine server, according to the caller's reports."""

    def __init__(self, clock: Callable[[], float], dead_after_s: float = DEAD_AFTER_S):
        self._clock, self.dead_after_s = clock, dead_after_s
        self._state = State.STALE
        self._label: str | None = None
        """Label under which weights were loaded last; None before the first load."""
        self._failing_since_s: float | None = None
        """Time of the first failure since the last answer; None if the last call was answered."""
        self._why = self._why_stale = "nothing was loaded into it yet"

    @property
    def state(self) -> State:
        return self._state

    @property
    def why(self) -> str:
        """Reason for the current state in one line; empty while healthy."""
        return self._why

    @property
    def may_generate(self) -> bool:
        return self._state is State.HEALTHY

    def failed(self, why: str) -> State:
        """Reports that a call to the server got no answer; returns the new state. The server counts as dead once calls
        have failed for `dead_after_s`."""
        now_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= self.dead_after_s:
            return self.gone(why)
        return self._move(State.SUSPECT if self._state is State.HEALTHY else self._state, why)

    def gone(self, why: str) -> State:
        """Reports that the server is dead, for example because its process has exited; returns the new state."""
        return self._move(State.DEAD, why)

    def answered(self, label: str) -> State:
        """Reports an answer, with the server's label for its weights; returns the new state."""
        self._failing_since_s = None
        if self._state is State.DEAD:
            self._why_stale = "it was dead and is back, with weights of unknown age"
        elif self._state is not State.STALE:
            if label == self._label:
                return self._move(State.HEALTHY, "")
            self._why_stale = (
                f"it serves weights labelled {label!r}, but the worker loaded weights labelled {self._label!r}"
            )
        return self._move(State.STALE, self._why_stale)

    def refreshed(self, label: str) -> State:
        """Reports that the server has loaded a verified version under `label`; returns the new state."""
        if self._state is State.DEAD:
            raise ValueError(
                f"weights {label!r} were reported as loaded into a server that is dead; report an answer of the server "
                "with `answered` first"
            )
        self._failing_since_s, self._label = None, label
        return self._move(State.HEALTHY, "")

    def _move(self, state: State, why: str) -> State:
        assert state is self._state or state in MOVES[self._state], (
            f"this is a bug: a server's state changed from {self._state} to {state}"
        )
        self._state, self._why = state, " ".join(why.split())
        return state
