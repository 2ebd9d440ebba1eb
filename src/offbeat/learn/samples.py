"""What learning sees of a batch: samples with their group, reward and mask, as numpy arrays.

A sample is a trajectory seen from the loss. `mask` says which response tokens may be trained on; it was decided when
the batch was claimed and only shrinks from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One answer, ready to be learnt from."""

    group: int
    prompt: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray
    """Behaviour log-probs, one per response token; 0 where tokens were given."""
    mask: np.ndarray
    """True where a response token may be trained on."""
    reward: float
    fresh: np.ndarray | None = None
    """True where a token was sampled from the very weights that the step begins with; None: wherever `mask` is."""

    def __post_init__(self) -> None:
        lengths = {len(self.response), len(self.logprobs), len(self.mask), len(self.is_fresh)}
        assert len(lengths) == 1, f"group {self.group}: tokens, log-probs and mask disagree in length: {lengths}"
        assert len(self.prompt) > 0, f"group {self.group}: a prompt needs a token to predict the first response from"

    @property
    def is_fresh(self) -> np.ndarray:
        return self.mask if self.fresh is None else self.fresh

    @property
    def num_tokens(self) -> int:
        return len(self.response)
