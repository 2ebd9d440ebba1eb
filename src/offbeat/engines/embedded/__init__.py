"""An engine inside this process: `engine` implements the protocol, `stepper` schedules, the other modules compute."""

from offbeat.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
