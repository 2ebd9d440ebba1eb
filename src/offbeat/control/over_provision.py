"""How many groups should be in flight over those wanted this step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.control.lengths import Lengths
from offbeat.control.rounds import Setting, Survivor
from offbeat.control.step_time import StepTimeFit


@dataclass(frozen=True, slots=True)
class Decision:
    """For one version."""

    factor: float
    reason: str
    """One line, for people."""
    predicted_tokens_per_s: float | None = None
    """None where nothing could be predicted."""
    predicted_step_s: float | None = None
    predicted_off_policy_share: float | None = None
    min_rows: int = 0
    """Rows below which the engine is mostly idle (B_80): whoever refills within a round does it below this only."""


class OverProvision:
    """See the module. `decide` once a version, `outcome` once its round is over."""

    def __init__(self, setting: Setting, lengths: Lengths, fit: StepTimeFit, *, seed: int = 0):
        self.setting, self.lengths, self.fit = setting, lengths, fit
        self.factor = 1.0

    def decide(self, survivors: Sequence[Survivor] = ()) -> Decision:
        """The factor for the round that begins, and what is expected of it."""
        raise NotImplementedError

    def outcome(self, tokens: float, seconds: float) -> None:
        """What the round gave: tokens generated, and its seconds together with those of the update after it."""
        raise NotImplementedError

    @property
    def error(self) -> float:
        """How far predictions of tokens a second were off lately, relatively."""
        raise NotImplementedError
