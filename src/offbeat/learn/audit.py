"""Whether a sample's log-probs can be believed.

Fresh tokens were sampled from the very weights that the step begins with, so the engine's log-probs and the trainer's
may differ by arithmetic alone. A sample whose fresh tokens are further off on average is not learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.learn.samples import Sample


def believable(samples: Sequence[Sample], start: np.ndarray, max_gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Which samples are off, and for each token whether its sample can be believed; `start` are the log-probs at the
    step's start, of all samples' tokens one after the other."""
    owner = np.repeat(np.arange(len(samples)), [sample.num_tokens for sample in samples])
    fresh = np.concatenate([sample.is_fresh for sample in samples])
    behaviour = np.concatenate([sample.logprobs for sample in samples])
    gaps = np.where(fresh, np.abs(start - behaviour), 0.0)
    num_fresh = np.bincount(owner, fresh, len(samples))
    off = np.bincount(owner, gaps, len(samples)) > max_gap * num_fresh
    return off, ~off[owner]
