"""A real engine whose steps take a modelled time; its tokens and log-probs are the model's."""

from __future__ import annotations

import time
from typing import Any

from transformers import PreTrainedModel

from offbeat.engines.embedded import EmbeddedEngine


class SteadyEngine(EmbeddedEngine):
    """An embedded engine that begins a step every `step_s` seconds at most; what the step leaves of them it sleeps.

    The paced engine would cost less, but its log-probs are random: an audit would find every honest worker guilty.
    """

    def __init__(self, model: PreTrainedModel, step_s: float, **settings: Any):
        self._step_s, self._due_s = step_s, 0.0
        super().__init__(model, **settings)

    def _take_commands(self) -> bool:
        going_on = super()._take_commands()
        time.sleep(max(self._due_s - time.monotonic(), 0.0))
        self._due_s = time.monotonic() + self._step_s
        return going_on
