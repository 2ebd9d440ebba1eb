"""The engine that a configuration asks for, and its next one where it dies. Only the one that is made is imported: a
paced engine needs no torch, and neither does one that is a server of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.config.checks import SERVED
from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.model.loading import resolve
from offbeat.weights.digest import files_digest

if TYPE_CHECKING:
    from offbeat.rollout.engine import Engine, EngineDied


class Engines(Protocol):
    """A worker's engine, and those that come after it."""

    has_next: bool
    """Whether there can be another once this one is dead."""

    async def open(self) -> Engine:
        """One that serves nothing until it is given a version; the one before it, if any, was buried."""
        ...

    async def gone(self) -> EngineDied:
        """Waits until it is known, other than by what the engine says itself, that it is dead."""
        ...

    async def bury(self, error: EngineDied) -> None:
        """Clears away a dead engine; raises where there will be no other after all."""
        ...

    async def close(self) -> None: ...

    def say(self, text: str) -> None:
        """Tells whoever reads the worker's log about its engine."""
        ...


class OwnEngine:
    """An engine in this very process: it dies with its worker."""

    has_next = False

    def __init__(self, config: Config, name: str):
        self.name, self._engine = name, make_engine(config, name)
        if why := getattr(self._engine, "obstacle", None):
            self.say(f'the model {why}: every step computes its answers anew; rollout.engine = "vllm" is faster')

    async def open(self) -> Engine:
        return self._engine

    async def gone(self) -> EngineDied:
        await asyncio.Event().wait()
        raise AssertionError

    async def bury(self, error: EngineDied) -> None:
        raise error

    async def close(self) -> None:
        await self._engine.close()

    @property
    def base(self) -> str | None:
        """What adapters stand on in the engine; None where it has no weights that could be wrong."""
        return getattr(self._engine, "base", None)

    def say(self, text: str) -> None:
        print(f"worker {self.name}: engine: {text}", flush=True)


def engines_of(config: Config, name: str, folder: Path, log: Path | None = None) -> Engines:
    """`folder` is the worker's own; what a server that it starts prints goes to `log`, or to a file in there."""
    if config.rollout.engine in SERVED:
        from offbeat.launch.served import ServedEngines

        return ServedEngines(config, name, folder, log)
    return OwnEngine(config, name)


class OwnBase:
    """Whether a worker's engine has what adapters stand on, by its digest; then nobody need fetch it."""

    def __init__(self, engines: Engines, config: Config):
        self._engines, self._config = engines, config
        self._said: str | None = None

    def __call__(self, digest: str) -> bool:
        if isinstance(self._engines, OwnEngine):
            return self._engines.base in (None, digest)
        if self._said != digest and not self._is_on_disk(digest):
            model = self._config.model.path
            self._engines.say(
                f"{model} cannot be shown to hold the base of the adapters, {digest[:12]}; it is served all the same"
            )
        self._said = digest
        return True  # a server has model.path and takes no other; the trainer's audit would tell

    def _is_on_disk(self, digest: str) -> bool:
        """Whether the model's files are those weights as they are; in another dtype they may be so all the same."""
        try:
            return files_digest(sorted(resolve(self._config.model.path).glob("*.safetensors"))) == digest
        except (OSError, ValueError, KeyError, TypeError):
            return False


def check_engine(config: Config, num_workers: int | None) -> None:
    """Refuses an engine that so many workers of one command cannot have; None: one process does all."""
    engine, url = config.rollout.engine, config.engine.url
    if engine in SERVED and num_workers is None:
        raise UserError(
            f'rollout.engine = "{engine}": allowed "embedded", "paced" in a run of one process; use offbeat train with '
            "rollout.workers = 1"
        )
    if url is not None and num_workers is not None and num_workers > 1:
        raise UserError(
            f'engine.url = "{url}": one server serves one worker, and rollout.workers = {num_workers}; set it to 1, or '
            "leave engine.url out, so that each starts its own"
        )


def make_engine(config: Config, name: str) -> Engine:
    """An engine of this process; it serves nothing until it is given a version."""
    assert config.rollout.engine not in SERVED, "see engines_of"
    if config.rollout.engine == "paced":
        return _paced(config, name)
    from offbeat.launch import models

    models.prepare_torch(config)
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
