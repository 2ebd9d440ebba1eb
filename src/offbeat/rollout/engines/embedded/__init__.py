"""An engine inside this process: any transformers causal LM, batched continuously over KV slots.

Read `engine` for the protocol's face, `stepper` for the scheduling, then `rows`, `slots`, `attention` and `sampling`
for what one step computes.
"""

from offbeat.rollout.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
