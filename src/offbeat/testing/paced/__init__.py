"""The paced engine: a complete engine without a model, for tests of code around engines.

It implements the engine protocol, segments and loads included, but its tokens and log-probs are hashes of seed,
position and version, and its steps take a modelled time. It needs no torch, no GPU and no weights, and runs as fast as
its `clock` and `sleep` allow: a thousand tokens cost what one costs.

    engine = PacedEngine(PacedSettings(num_slots=8, base_s=0.01), version=0)
    generation = await engine.generate(Request("a", np.arange(5), seed=1, sampling=Sampling(max_new_tokens=100)))

A whole run uses it with `rollout.engine = "paced"`: rewards, ledger, trainer and fault handling are real, but there is
nothing to learn from random tokens.
"""

from __future__ import annotations

from offbeat.testing.paced.engine import PacedEngine
from offbeat.testing.paced.settings import FixedLength, LengthModel, LogNormalLength, PacedSettings

__all__ = ["FixedLength", "LengthModel", "LogNormalLength", "PacedEngine", "PacedSettings"]
