"""Builds the parts of a run with tools or environments: formats of turns, processes with environments, limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offbeat.config.schema import AnyTask, ArithmeticTask, Config, EnvironmentTask, FileTask, is_episode
from offbeat.data.mixture import source_names
from offbeat.data.prompts import Renderer
from offbeat.environments.calls import find_format
from offbeat.environments.formats import PlainFormat, TurnFormat
from offbeat.environments.pool import EnvironmentPool
from offbeat.environments.turns import ChatFormat
from offbeat.environments.wire import PartInfo, PartSpec
from offbeat.errors import UserError
from offbeat.worker.episodes import EpisodeLimits, Episodes


class Tokens(Protocol):
    """What of a model's tokenizer is needed here; `wiring.TokenLimits` has it."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class _Source:
    """A task's source, as `Renderer` sees it; a worker does not open the source itself."""

    name: str
    chat: bool | None
    system: str | None
    is_opened: bool


def episode_tasks(config: Config) -> dict[str, AnyTask]:
    """Returns the tasks with tools or an environment, by the name of their source."""
    named = zip(source_names(config.task), config.task, strict=True)
    return {name: task for name, task in named if is_episode(task)}


def part_specs(config: Config) -> dict[str, PartSpec]:
    specs = {}
    for name, task in episode_tasks(config).items():
        specs[name] = (
            PartSpec(task.path, dict(task.options), tuple(task.tools))
            if isinstance(task, EnvironmentTask)
            else PartSpec(tools=tuple(task.tools))
        )
    return specs


def open_environments(config: Config, log: Path) -> EnvironmentPool:
    """Returns the pool of processes with environments of one worker, not started yet."""
    settings = config.environment
    return EnvironmentPool(
        part_specs(config),
        processes=settings.processes,
        step_timeout_s=settings.step_timeout_s,
        parallel_calls=settings.parallel_calls,
        memory_mb=settings.memory_mb,
        log_path=log,
    )


async def describe(config: Config) -> dict[str, PartInfo]:
    """Loads all tools and environments once, in a process, and returns what is found; raises `UserError`."""
    if not episode_tasks(config):
        return {}
    descriptor, name = tempfile.mkstemp(prefix="offbeat-environments-", suffix=".log")
    os.close(descriptor)
    pool = open_environments(config, Path(name))
    try:
        parts = await pool.start()
        await _try_all(pool, parts)
        _check_exact(config, parts)
        return parts
    finally:
        await pool.close()
        Path(name).unlink(missing_ok=True)


async def _try_all(pool: EnvironmentPool, parts: Mapping[str, PartInfo]) -> None:
    """Begins one episode of each environment, so that a wrong one is found before anything starts."""
    for source in parts:
        session = await pool.open(source)
        try:
            await session.begin({"prompt": "", "answer": None, "info": {"ordinal": 0, "held_out": False}}, 0)
        except Exception as error:
            if parts[source].has_environment:
                raise UserError(f"task {source}: its environment was tried, and begin failed: {error}") from error
            raise
        finally:
            session.close()


def _check_exact(config: Config, parts: Mapping[str, PartInfo]) -> None:
    for source, part in parts.items():
        if config.run.exact and not part.deterministic:
            raise UserError(
                f"run.exact = true: task {source} has tools or an environment that do not say `deterministic = True`, "
                "so its episodes may differ from one time to the next; say so where it is true, or set "
                "run.exact = false"
            )


def shown_tools(parts: Mapping[str, PartInfo]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Returns the schemas that a chat template shows to the model, by source."""
    return {source: [tool.schema for tool in part.tools] for source, part in parts.items() if part.tools}


def make_formats(config: Config, tokens: Tokens, parts: Mapping[str, PartInfo]) -> dict[str, TurnFormat]:
    """Returns the formats of turns by source; raises `UserError` if a chat template cannot be used."""
    renderer = Renderer(tokens.tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens, tools=shown_tools(parts))
    settings, tasks = config.environment, episode_tasks(config)
    formats: dict[str, TurnFormat] = {}
    for source, part in parts.items():
        task, after = tasks[source], None
        is_chat = _is_chat(task, renderer.template)
        if isinstance(task, EnvironmentTask):
            after, is_chat = renderer.after_opening(_Source(source, task.chat, task.system, is_opened=True))
        shared = (tokens.stop_token_ids, part, source, settings.max_observation_tokens)
        if is_chat and renderer.template is not None:
            chosen = find_format(settings.calls, "environment.calls") if settings.calls and part.tools else None
            formats[source] = ChatFormat(tokens.tokenizer, renderer.template, *shared, chosen, after)
        else:
            formats[source] = PlainFormat(tokens.tokenizer, *shared)
    return formats


def _is_chat(task: AnyTask, template: str | None) -> bool:
    """Whether the prompts of a task go through the chat template."""
    if isinstance(task, ArithmeticTask) or template is None:
        return False
    if isinstance(task, FileTask) and task.messages is not None:
        return True
    return task.chat is not False


@asynccontextmanager
async def playing(config: Config, tokens: Tokens | None, log: Path) -> AsyncIterator[Episodes | None]:
    """Yields what carries on a worker's episodes; None if the run has none. `tokens` may be None only then."""
    if not episode_tasks(config):
        yield None
        return
    assert tokens is not None
    pool, settings = open_environments(config, log), config.environment
    try:
        parts = await pool.start()
        limits = EpisodeLimits(
            settings.max_turns, settings.max_turn_tokens, settings.episode_timeout_s, settings.bad_calls
        )
        yield Episodes(pool, make_formats(config, tokens, parts), limits, settings.episodes)
    finally:
        await pool.close()
