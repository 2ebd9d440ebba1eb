"""Checks and previews a run before it starts, and lists the keys of the configuration."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from offbeat.config import Config, resolved, summarise
from offbeat.config.explain import describe, show
from offbeat.config.keys import COMMON_KEYS, dotted, leaves, value_at
from offbeat.config.schema import FileTask
from offbeat.errors import UserError
from offbeat.launch.run_folder import refuse_used
from offbeat.model.loading import HUB_ID, TINY
from offbeat.model.loading import resolve as resolve_model
from offbeat.observability.sinks import check_sinks

NEXT_SENTENCE = re.compile(r"(?<=[.]) (?=[A-Z0-9]|[a-z]+:)")
HEADER_LENGTH_BYTES = 8
"""Bytes at the start of a safetensors file that hold the length of its JSON header."""


def check(config: Config, resume: Path | None = None) -> None:
    """Raises `UserError` for files, models or packages that are missing on this machine, and if the name of a new run
    is taken."""
    if resume is None and config.run.name:
        refuse_used(Path(config.run.dir) / config.run.name)
    check_sinks(config.log.sinks)
    if _is_local(config.model.path):
        resolve_model(config.model.path)
    data = resolved(config)
    for key in ("tokenizer", "chat_template"):
        _must_exist(f"model.{key}", data["model"][key])
    for index, task in enumerate(config.task):
        if isinstance(task, FileTask) and task.source == "file":
            _must_exist(dotted(("task", index, "path"), data), task.path)
        _function_must_exist(dotted(("task", index, "reward"), data), task.reward)
    _function_must_exist("loss.name", config.loss.name)
    _function_must_exist("loss.advantage", config.loss.advantage)


def preview(config: Config, resume: Path | None = None) -> list[str]:
    """Returns the lines of --dry-run: the keys that differ from their defaults, and a summary of the run."""
    what = f"would resume {resume}" if resume else f"would start a run in {config.run.dir}/{config.run.name or ''}"
    return [what, *_settings(config), "", *summarise(config, _num_parameters(config))]


def list_keys(*, only_common: bool) -> str:
    """Returns a line for each key: its name, its default and the first sentence about it."""
    found: dict[str, str] = {}
    for section, rows in describe():
        for name, default, meaning in rows:
            key = f"{section.split(',')[0]}.{name}"
            found.setdefault(key, f"{key:<30} {default:<14} {NEXT_SENTENCE.split(meaning, maxsplit=1)[0]}")
    if not only_common:
        return "\n".join([*found.values(), "", "docs/configuration.md has types, ranges and the whole text."])
    more = f"{len(COMMON_KEYS)} of {len(found)} keys; all of them: offbeat train --keys all"
    return "\n".join([*(found[key] for key in COMMON_KEYS), "", more])


def _settings(config: Config) -> list[str]:
    data, defaults = resolved(config), resolved(Config())
    changed = [(place, value) for place, value in leaves(data) if value_at(defaults, place) != value]
    return [f"{dotted(place, data):<24} {show(value)}" for place, value in changed]


def _is_local(path: str) -> bool:
    """Returns whether a model path refers to this machine rather than to the hub."""
    return path == TINY or Path(path).expanduser().exists() or not HUB_ID.fullmatch(path)


def _must_exist(key: str, path: str | None) -> None:
    if path is None or Path(path).expanduser().exists() or (key == "model.tokenizer" and not _is_local(path)):
        return
    raise UserError(f"{key} = {show(path)}: no such file or folder; relative paths start at {Path.cwd()}")


def _function_must_exist(key: str, spec: str | None) -> None:
    """Raises `UserError` if `spec` is `file.py:function` and the file is missing."""
    file, colon, _ = (spec or "").rpartition(":")
    if colon and file.endswith(".py"):
        _must_exist(key, file)


def _num_parameters(config: Config) -> int | None:
    """Returns the model's number of parameters, from the headers of its files; None if they are not on this machine."""
    if not _is_local(config.model.path):
        return None
    files = sorted(resolve_model(config.model.path).glob("*.safetensors"))
    return sum(_count(file) for file in files) or None


def _count(file: Path) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(HEADER_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
