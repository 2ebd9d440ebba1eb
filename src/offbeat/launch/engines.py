"""The engine that a configuration asks for. Only the one that is made is imported: a paced engine needs no torch."""

from __future__ import annotations

import json

from offbeat.config.models import Config
from offbeat.model.loading import resolve
from offbeat.rollout.engine import Engine


def make_engine(config: Config, name: str) -> Engine:
    """An engine that serves nothing until it is given a version."""
    if config.rollout.engine == "paced":
        return _paced(config, name)
    from offbeat.launch import models

    models.set_threads(config)
    return models.make_embedded(config, name)


def _paced(config: Config, name: str) -> Engine:
    from offbeat.rollout.engines.paced import LogNormalLength, PacedEngine, PacedSettings

    paced, rollout = config.paced, config.rollout
    return PacedEngine(
        PacedSettings(
            num_slots=rollout.slots,
            max_context_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
            vocab_size=_vocab_size(config),
            base_s=paced.base_s,
            per_row_s=paced.per_row_s,
            prefill_s=paced.prefill_s,
            load_s=paced.load_s,
            speed=paced.speed,
            lengths=LogNormalLength(paced.median_tokens, paced.sigma, rollout.max_new_tokens),
        ),
        worker=name,
    )


def _vocab_size(config: Config) -> int:
    """Tokens beyond the model's would be refused."""
    told = json.loads((resolve(config.model.path) / "config.json").read_text())
    return int(told.get("vocab_size") or told["text_config"]["vocab_size"])
