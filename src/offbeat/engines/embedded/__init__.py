"""An engine inside this process: any transformers causal LM, batched continuously over KV slots.

`engine` implements the protocol and `stepper` schedules; `attention`, `decode_forward`, `prefill` and `sampling`
compute a step.
"""

from offbeat.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
