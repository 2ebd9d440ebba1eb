"""Numbers that are not finite end a step before its optimizer update, and say where they were found."""

from __future__ import annotations

from offbeat.errors import OffbeatError


class NotFinite(OffbeatError):
    """A tensor of the step under way holds NaN or infinity; nothing was updated with it."""

    def __init__(self, tensor: str, sample: int | None = None, token: int | None = None):
        super().__init__(f"{tensor} is not finite")
        self.tensor = tensor
        """In words: the log-probs of the trainer, the loss, the gradient of a weight."""
        self.sample, self.token = sample, token
        """Which sample of the batch, and which of its response tokens, where it can be told."""
        self.num_updates = 0
        """Updates of the same step that were made before: after one the policy is not that of the step's start."""
