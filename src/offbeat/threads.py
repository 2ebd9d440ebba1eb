"""How torch's threads wait for one another on a CPU. To be settled before torch is imported, which reads it once."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"
"""How long a thread spins before it sleeps, in turns of a loop: a few microseconds. By default it is about a thousand
times that, which gains nothing on idle cores and makes a step five to eight times slower beside one busy neighbour."""


def spin_briefly() -> None:
    """Sets this for the process and its children, unless the user has chosen."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
