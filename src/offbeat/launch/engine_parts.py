"""Makes a worker's configured engine, and a new one if the engine's server dies.

Only the configured engine's modules are imported. The engine for tests ("paced") and engines that run as a server need
no torch in the worker.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.config.schema import SERVED, Config
from offbeat.errors import UserError
from offbeat.launch.gpu_memory import LOCK, server_share
from offbeat.model.loading import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from offbeat.engines.protocol import Engine, EngineDied


class Engines(Protocol):
    """Opens the engines of a worker, one at a time; with `has_next`, a new engine can replace one that died."""

    has_next: bool
    """Whether `open` can be called again after an engine died."""

    async def open(self) -> Engine:
        """Opens an engine, which generates nothing before its first weights are loaded. If the previous engine died,
        `dispose` must be called first."""
        ...

    async def wait_exited(self) -> EngineDied:
        """Waits until the engine dies, even if nobody uses the engine meanwhile; returns the error to raise."""
        ...

    async def dispose(self, error: EngineDied) -> None:
        """Cleans up after an engine that died with `error`; raises if no new engine can be opened."""
        ...

    async def close(self) -> None: ...

    def log(self, text: str) -> None:
        """Adds a line about the engine to the worker's log."""
        ...


class OwnEngine:
    """A single engine in the worker's own process; if it dies, so does the worker."""

    has_next = False

    def __init__(self, config: Config, name: str):
        self.name, self._engine = name, make_engine(config, name)
        if why := getattr(self._engine, "obstacle", None):
            self.log(
                f"the model {why}, so every step recomputes all answers from their first token; "
                'rollout.engine = "vllm" is faster'
            )

    async def open(self) -> Engine:
        return self._engine

    async def wait_exited(self) -> EngineDied:
        await asyncio.Event().wait()
        raise AssertionError

    async def dispose(self, error: EngineDied) -> None:
        raise error

    async def close(self) -> None:
        await self._engine.close()

    @property
    def base(self) -> str | None:
        """Digest of the engine's base model, on which adapters are loaded; None: any base will do."""
        return getattr(self._engine, "base", None)

    def log(self, text: str) -> None:
        print(f"worker {self.name}: engine: {text}", flush=True)


def engines_of(
    config: Config, name: str, folder: Path, log: Path | None = None, *, beside_trainer: Path | None = None
) -> Engines:
    """Returns the `Engines` of worker `name`. The output of an engine's server goes to file `log`; None: to a file in
    `folder`, the worker's folder. `beside_trainer` is the run's folder if the server shares its GPU with the trainer,
    else None."""
    if config.rollout.engine in SERVED:
        from offbeat.engines.process.lifecycle import ServerEngines

        if beside_trainer is None:
            return ServerEngines(config, name, folder, log)
        return ServerEngines(config, name, folder, log, partial(server_share, config), beside_trainer / LOCK)
    return OwnEngine(config, name)


class HasAdapterBase:
    """Callable that returns whether the worker already has the adapters' base model with the given digest. If it
    returns True, the worker does not fetch the base model. Always True for an engine that runs as a server, because a
    server can only use the base model in `model.path`."""

    def __init__(self, engines: Engines, config: Config):
        self._engines, self._config = engines, config
        self._checked: str | None = None

    def __call__(self, digest: str) -> bool:
        if isinstance(self._engines, OwnEngine):
            return self._engines.base in (None, digest)
        if self._checked != digest and not self._is_on_disk(digest):
            model = self._config.model.path
            self._engines.log(
                f"model.path = {model!r}: its files do not match the digest of the adapters' base model "
                f"({digest[:12]}), perhaps only because of another dtype; it is served anyway"
            )
        self._checked = digest
        return True  # a server uses only model.path; the trainer's audit detects a wrong base

    def _is_on_disk(self, digest: str) -> bool:
        """Returns whether the model's files have this digest. The same base in another dtype has a different digest."""
        from offbeat.weights.version import files_digest  # imported late: a dry run then does not wait for numpy

        try:
            return files_digest(sorted(resolve(self._config.model.path).glob("*.safetensors"))) == digest
        except (OSError, ValueError, KeyError, TypeError):
            return False


def check_engine(config: Config, num_workers: int | None) -> None:
    """Raises a `UserError` if one command cannot start `num_workers` workers with the configured engine. `num_workers`
    is None for a run in one process, which allows no engine that runs as a server."""
    engine, url = config.rollout.engine, config.engine.url
    if engine in SERVED and num_workers is None:
        raise UserError(
            f'rollout.engine = "{engine}": needs a worker in a process of its own; set rollout.workers = 1, or '
            'rollout.engine = "embedded"'
        )
    if url is not None and num_workers is not None and num_workers > 1:
        raise UserError(
            f'engine.url = "{url}": one server serves only one worker, but rollout.workers = {num_workers}; set '
            "rollout.workers = 1, or leave out engine.url so that each worker starts its own server"
        )


def make_engine(config: Config, name: str, model: PreTrainedModel | None = None) -> Engine:
    """Makes the configured engine in this process; it serves nothing before its first weights are loaded. An embedded
    engine takes over `model`; None: it loads a model of its own."""
    assert config.rollout.engine not in SERVED, f"{config.rollout.engine} runs as a server; use engines_of"
    if config.rollout.engine == "paced":
        return _paced(config, name)
    from offbeat.launch import model_parts

    model_parts.prepare_torch(config)
    return model_parts.make_embedded(config, name, model=model)


def _paced(config: Config, name: str) -> Engine:
    from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings

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
    """Returns the vocabulary size in the model's config.json; the coordinator refuses token ids outside it."""
    data = json.loads((resolve(config.model.path) / "config.json").read_text())
    return int(data.get("vocab_size") or data["text_config"]["vocab_size"])
