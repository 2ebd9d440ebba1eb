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
    segment: np.ndarray | None = None
    """For each token, where its segment begins; None: it is one segment."""
    version: np.ndarray | None = None
    """The version of each token; None: not known, so that only fresh ones can be compared with its weights."""
    old_kv: np.ndarray | None = None
    """True where a token attended to keys and values of weights older than its own; None: nowhere."""
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
        """True where a token was sampled from the very weights that the step begins with, and from nothing older."""
        return (self.ages == 0) & self._own_kv

    @property
    def is_stale(self) -> np.ndarray:
        """True where a trained token was sampled from older weights, and from those alone."""
        return (self.ages > 0) & self._own_kv

    @property
    def _own_kv(self) -> np.ndarray | bool:
        return True if self.old_kv is None else ~self.old_kv

    @property
    def starts(self) -> np.ndarray:
        """For each token, where its segment begins."""
        return np.zeros(self.num_tokens, np.int64) if self.segment is None else self.segment

    @property
    def counted(self) -> np.ndarray:
        """True where a token counts in denominators: rejecting some must not make the others weigh more."""
        return self.mask if self.sampled is None else self.sampled | self.mask

    @property
    def num_tokens(self) -> int:
        return len(self.response)
