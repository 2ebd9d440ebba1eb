"""An engine inside this process: `engine` implements the protocol, `stepper` schedules, the others compute a step."""

from offbeat.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
