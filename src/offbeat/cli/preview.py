"""Checks and previews a run before it starts, and lists the keys of the configuration."""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.config import Config, resolved, summarise
from offbeat.config.explain import describe, show
from offbeat.config.keys import COMMON_KEYS, dotted, leaves, value_at
from offbeat.config.schema import FileTask
from offbeat.errors import UserError
from offbeat.launch.run_folder import refuse_used
from offbeat.model.loading import is_hub_name, resolve
from offbeat.observability.sinks import check_sinks
from offbeat.spelling import nearest

NEXT_SENTENCE = re.compile(r"(?<=[.]) (?=[A-Z0-9]|[a-z]+:)")


def check(config: Config, resume: Path | None = None) -> None:
    """Raises `UserError` if this machine lacks a file, model or package that the run needs, or if the name of a new run
    is taken."""
    if resume is None and config.run.name:
        refuse_used(Path(config.run.dir) / config.run.name)
    check_sinks(config.log.sinks)
    if not is_hub_name(config.model.path):
        resolve(config.model.path)
    data = resolved(config)
    for key in ("tokenizer", "chat_template"):
        _must_exist(f"model.{key}", data["model"][key])
    for index, task in enumerate(config.task):
        if isinstance(task, FileTask) and task.source == "file":
            _must_exist(dotted(("task", index, "path"), data), task.path)
        _function_must_exist(dotted(("task", index, "reward"), data), task.reward)
    _function_must_exist("loss.name", config.loss.name)
    _function_must_exist("loss.advantage", config.loss.advantage)


def preview(
    config: Config,
    resume: Path | None = None,
    num_parameters: int | None = None,
    num_held_out: int | None = None,
    *,
    given: Config | None = None,
) -> list[str]:
    """Returns the first lines of --dry-run: the keys that differ from their defaults, and a summary of the run, see
    `summarise`. `given` is the configuration before an engine was chosen for it; None: same as `config`."""
    what = f"would resume {resume}" if resume else f"would start a run in {config.run.dir}/{config.run.name or ''}"
    return [what, *_settings(given or config), "", *summarise(config, num_parameters, num_held_out)]


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
    # The keys of a task depend on its source. A required key has no default, so it always differs.
    defaults["task"] = [
        {name: field.default for name, field in type(task).model_fields.items()} for task in config.task
    ]
    changed = [(place, value) for place, value in leaves(data) if value_at(defaults, place) != value]
    return [f"{dotted(place, data):<24} {show(value)}" for place, value in changed]


def _must_exist(key: str, path: str | None) -> None:
    if path is None or Path(path).expanduser().exists() or (key == "model.tokenizer" and is_hub_name(path)):
        return
    raise UserError(f"{key} = {show(path)}: no such file or folder; {_remedy(path)}")


def _function_must_exist(key: str, spec: str | None) -> None:
    """Raises `UserError` if `spec` is `file.py:function` and the file is missing."""
    file, colon, _ = (spec or "").rpartition(":")
    if colon and file.endswith(".py") and not Path(file).expanduser().exists():
        raise UserError(f"{key} = {show(spec)}: there is no file {file}; {_remedy(file)}")


def _remedy(path: str) -> str:
    """Names the file or folder that a missing `path` probably means; if there is none, where relative paths start."""
    file = Path(path).expanduser()
    beside = sorted(other.name for other in file.parent.glob("*") if other.suffix == file.suffix)
    near = nearest(file.name, beside)
    return f"did you mean {Path(path).with_name(near)}?" if near else f"relative paths start at {Path.cwd()}"
