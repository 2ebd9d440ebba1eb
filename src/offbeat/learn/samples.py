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
    """All that was earned, weighted and added up."""
    staleness: np.ndarray | None = None
    """Steps since a token's version, where `mask` is; None: 0 everywhere."""
    sampled: np.ndarray | None = None
    """True where a token was sampled, even if it is too old to be trained on; None: wherever `mask` is."""
    rewards: tuple[tuple[int, float], ...] = ()
    """The same reward as (position, value), already weighted; empty: all of it at the last token."""
    siblings: int | None = None
    """What it has in common with other answers to its prompt that were claimed apart from it; None: its group."""
    earlier: tuple[float, ...] = ()
    """Rewards of such answers that are not in the batch."""

    def __post_init__(self) -> None:
        lengths = {len(self.response), len(self.logprobs), len(self.mask), len(self.ages)}
        assert len(lengths) == 1, f"group {self.group}: tokens, log-probs and mask disagree in length: {lengths}"
        assert len(self.prompt) > 0, f"group {self.group}: a prompt needs a token to predict the first response from"

    @property
    def prompt_id(self) -> int:
        """The same for all answers to one prompt, which share its tokens and are judged against each other."""
        return self.group if self.siblings is None else self.siblings

    @property
    def ages(self) -> np.ndarray:
        """The staleness of each token; -1 where it is not trained on."""
        if self.staleness is None:
            return np.where(self.mask, 0, -1)
        return np.where(self.mask, self.staleness, -1)

    @property
    def is_fresh(self) -> np.ndarray:
        """True where a token was sampled from the very weights that the step begins with."""
        return self.ages == 0

    @property
    def counted(self) -> np.ndarray:
        """True where a token counts in denominators: rejecting some must not make the others weigh more."""
        return self.mask if self.sampled is None else self.sampled | self.mask

    @property
    def num_tokens(self) -> int:
        return len(self.response)
