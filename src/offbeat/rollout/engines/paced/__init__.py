"""The paced engine: a real engine without a model, whose steps take a modelled time."""

from __future__ import annotations

from offbeat.rollout.engines.paced.engine import PacedEngine
from offbeat.rollout.engines.paced.settings import FixedLength, LengthModel, LogNormalLength, PacedSettings

__all__ = ["FixedLength", "LengthModel", "LogNormalLength", "PacedEngine", "PacedSettings"]
