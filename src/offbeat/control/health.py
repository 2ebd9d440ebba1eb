"""Whether a server that generates for us can be reached, and whether it still serves the weights that we gave it.

Duty: keep tokens of unknown weights out of training. A server may hang, die, be restarted by someone else with the
weights that it was first started with, or be given others behind our back; what it calls its weights is only a name,
and a restarted server may use the same one again. The caller reports what it saw and asks `may_generate`. No I/O.

Guarantees: generation begins only after a refresh, and after a death, or once the server was seen to serve anything
else, only after another; however often it answers, and whatever it says, never leads there. A label that was read
before a refresh and is reported after it makes the server stale for nothing: whoever reports keeps their order.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

DEAD_AFTER_S = 10.0
"""A server that loads weights may be deaf for seconds; one that is gone should not hold its tasks for longer."""


class State(StrEnum):
    """Life of one server, as its worker sees it."""

    HEALTHY = "healthy"
    """It serves what we loaded last."""
    SUSPECT = "suspect"
    """Calls get no answer: nothing new is asked of it, what it has is not given up yet."""
    DEAD = "dead"
    """Given up: what it was generating is lost."""
    STALE = "stale"
    """It serves weights that we cannot vouch for, and must be given a version first."""


MOVES = {
    State.HEALTHY: {State.SUSPECT, State.DEAD, State.STALE},
    State.SUSPECT: {State.HEALTHY, State.DEAD, State.STALE},
    State.DEAD: {State.STALE},
    State.STALE: {State.HEALTHY, State.DEAD},
}
"""Dead to healthy is missing: whoever answers after a death may be another process with other weights under the same
label. So is stale to suspect, from where an answer would do to be healthy."""


class Health:
    """One server; see the module."""

    def __init__(self, clock: Callable[[], float], dead_after_s: float = DEAD_AFTER_S):
        self._clock, self.dead_after_s = clock, dead_after_s
        self._state = State.STALE
        self._label: str | None = None
        """Of the last refresh."""
        self._failing_since_s: float | None = None
        """When the first call failed after which none was answered."""
        self._why = self._why_stale = "nothing was loaded into it yet"

    @property
    def state(self) -> State:
        return self._state

    @property
    def why(self) -> str:
        """One line: what was seen last; empty while healthy."""
        return self._why

    @property
    def may_generate(self) -> bool:
        return self._state is State.HEALTHY

    def failed(self, why: str) -> State:
        """A call got no answer."""
        now_s = self._clock()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= self.dead_after_s:
            return self.gone(why)
        return self._move(State.SUSPECT if self._state is State.HEALTHY else self._state, why)

    def gone(self, why: str) -> State:
        """It is known to be gone, such as a process that has exited."""
        return self._move(State.DEAD, why)

    def answered(self, label: str) -> State:
        """It answers, and this is what it calls its weights."""
        self._failing_since_s = None
        if self._state is State.DEAD:
            self._why_stale = "it was dead and is back, with weights of unknown age"
        elif self._state is not State.STALE:
            if label == self._label:
                return self._move(State.HEALTHY, "")
            self._why_stale = f"it serves weights called {label!r}, and {self._label!r} was loaded"
        return self._move(State.STALE, self._why_stale)

    def refreshed(self, label: str) -> State:
        """It loaded a version whose digest was verified, and calls it so."""
        if self._state is State.DEAD:
            raise ValueError(f"{label!r} cannot have been loaded: the server is dead and has not answered since")
        self._failing_since_s, self._label = None, label
        return self._move(State.HEALTHY, "")

    def _move(self, state: State, why: str) -> State:
        assert state is self._state or state in MOVES[self._state], f"{self._state} to {state}"
        self._state, self._why = state, " ".join(why.split())
        return state
