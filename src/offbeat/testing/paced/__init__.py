"""The paced engine: a complete engine without a model, for tests of the code around engines.

It implements the whole engine protocol, including segments and loads. Its tokens and log-probs are hashes of seed,
position and version, and its steps take a modelled time. It needs no torch, no GPU and no weights. It runs as fast as
its `clock` and `sleep` allow: generating a thousand tokens takes hardly more CPU time than one.

    engine = PacedEngine(PacedSettings(num_slots=8, base_s=0.01), version=0)
    generation = await engine.generate(Request("a", np.arange(5), seed=1, sampling=Sampling(max_new_tokens=100)))

With `rollout.engine = "paced"`, a whole run uses it: rewards, ledger, trainer and fault handling are real, but the
policy learns nothing from random tokens.
"""

from __future__ import annotations

from offbeat.testing.paced.engine import PacedEngine
from offbeat.testing.paced.settings import FixedLength, LengthModel, LogNormalLength, PacedSettings

__all__ = ["FixedLength", "LengthModel", "LogNormalLength", "PacedEngine", "PacedSettings"]
