"""Whether a worker can still be believed.

Duty: shut out a worker whose log-probs are not those of the weights that it claims, by mistake or on purpose, and no
worker that met one odd sample. Audits are the trainer's own recomputation; see `offbeat.learn.step`.
"""

from __future__ import annotations

MIN_FAILURES = 8
"""Fewer prove nothing: a flipped bit, a driver's hiccup."""
MAX_SHARE = 0.1


def is_believable(num_audited: int, num_failures: int) -> bool:
    """The verdict on a worker of whom so many trajectories were looked at, and so many could not be believed."""
    return num_failures < MIN_FAILURES or num_failures <= MAX_SHARE * num_audited
