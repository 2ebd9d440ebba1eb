"""The paced engine: a complete engine without a model, for tests of the code around engines.

It implements the whole engine protocol, including segments and loads. Tokens are hashes of seed and position; log-probs
are hashes of seed, position and version. The duration of decode steps is computed from settings; with another `clock`
and `sleep`, the engine runs in simulated time. It needs no torch, no GPU and no weights. With `rollout.engine =
"paced"`, a whole run uses it: rewards, ledger, trainer and fault handling are real, but the policy learns nothing from
random tokens.
"""

from __future__ import annotations

from offbeat.testing.paced.engine import PacedEngine
from offbeat.testing.paced.settings import FixedLength, LengthModel, LogNormalLength, PacedSettings

__all__ = ["FixedLength", "LengthModel", "LogNormalLength", "PacedEngine", "PacedSettings"]
