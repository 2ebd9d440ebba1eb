"""A task of one's own: a function that returns the problem of a number, the same one for the same arguments."""

import random
from typing import Any


def problem(ordinal: int, seed: int, held_out: bool) -> dict[str, Any]:
    """A sum of two numbers; a tenth of all pairs is held out, so that evaluation never asks what training has shown."""
    rng = random.Random(f"{seed}:{ordinal}")
    while True:
        a, b = rng.randint(1, 49), rng.randint(1, 49)
        if ((a + 3 * b) % 10 == 0) == held_out:
            return {"prompt": f"{a}+{b}=", "answer": str(a + b), "info": {"terms": [a, b]}}
