"""The keys of a configuration file: their lines, their fields, and hints for misspelt ones.

A place is a tuple such as ("task", 0, "level"). The keys of a `task` table depend on its `source`, so functions take
the configuration's data as well as the place. `root` is the pydantic model of the file, by default `Config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from offbeat.config.schema import AnyTask, Config, Section, TaskConfig
from offbeat.spelling import nearest

Path = tuple[str | int, ...]
"""Place of a key in a configuration."""

TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{},=\n]"
    r"""|[^\s\[\]{},=#"']+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """Returns the line, from 1, of every key and table header in a TOML text."""
    return _Scanner(text).scan()


class _Scanner:
    """Finds the lines of keys in a text that `tomllib` has accepted. It must never hang. If it misses a key, errors
    about this key merely lack the line number."""

    def __init__(self, text: str):
        self.tokens: list[tuple[str, int]] = []
        line, seen = 1, 0
        for match in TOKEN.finditer(text):
            line += text.count("\n", seen, match.start())
            seen = match.start()
            if not match.group().startswith("#"):
                self.tokens.append((match.group(), line))
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.table_counts: dict[Path, int] = {}

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            if token == "\n":
                self.at += 1
            elif token == "[":
                table = self._header()
                self.lines.setdefault(table, line)
            else:
                self._pair(table)
        return self.lines

    def _header(self) -> Path:
        brackets = 2 if self._peek(1) == "[" else 1
        self.at += brackets
        names = self._key("]") or [""]
        self.at += brackets
        parent = self._inside(names[:-1])
        path = (*parent, names[-1])
        if brackets == 1:
            return self._inside(names)
        count = self.table_counts.get(path, 0)
        self.table_counts[path] = count + 1
        return (*path, count)

    def _inside(self, names: list[str]) -> Path:
        """Returns the place of the table whose dotted name has the parts `names`. The name of an array of tables stands
        for the last table of this array so far."""
        path: Path = ()
        for name in names:
            path = (*path, name)
            if path in self.table_counts:
                path = (*path, self.table_counts[path] - 1)
        return path

    def _pair(self, table: Path) -> None:
        line = self.tokens[self.at][1]
        path = (*table, *self._key("="))
        self.at += 1
        self.lines.setdefault(path, line)
        self._value(path)

    def _key(self, until: str) -> list[str]:
        names: list[str] = []
        while self._peek() not in (until, None):
            token = self.tokens[self.at][0]
            self.at += 1
            if token[0] in "\"'":
                names.append(token[1:-1])
            else:
                names += [name for name in token.split(".") if name]
        return names

    def _value(self, path: Path) -> None:
        if self._peek() in ("[", "{"):
            closing = "]" if self._peek() == "[" else "}"
            self.at += 1
            index = 0
            while self._peek() not in (closing, None):
                if self._peek() in (",", "\n", "}"):  # valid TOML has no stray brace; skip it to avoid hanging
                    index += self._peek() == ","
                    self.at += 1
                elif closing == "}":
                    self._pair(path)
                else:
                    self.lines[(*path, index)] = self.tokens[self.at][1]
                    self._value((*path, index))
            self.at += 1
            return
        while self._peek() not in ("\n", ",", "]", "}", None):
            self.at += 1

    def _peek(self, ahead: int = 0) -> str | None:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else None


MISSING = object()


TASK_MODELS: dict[str, type[TaskConfig]] = {
    name: model
    for model in get_args(get_args(AnyTask)[0])
    for name in get_args(model.model_fields["source"].annotation)
}
"""Pydantic models of `task` tables, by the table's `source`."""

COMMON_KEYS = (
    *("run.name", "run.steps", "run.seed", "run.dir", "run.max_hours", "run.exact"),
    *("model.path", "model.dtype", "model.device", "model.lora_rank", "model.gradient_checkpointing"),
    *("task.source", "task.path", "task.reward", "task.prompt", "task.answer", "task.weight"),
    *("reward.processes", "reward.timeout_s"),
    *("batch.groups_per_step", "batch.group_size", "batch.updates_per_step", "batch.tokens_per_microbatch"),
    *("schedule.mode", "schedule.max_staleness", "schedule.over_provision"),
    *("rollout.workers", "rollout.engine", "rollout.slots", "rollout.temperature"),
    *("rollout.max_prompt_tokens", "rollout.max_new_tokens", "optimizer.lr", "optimizer.warmup_steps"),
    *("loss.name", "loss.kl_coef", "eval.every", "eval.prompts", "checkpoint.every", "log.sinks"),
)
"""The keys that most users need, which `offbeat train --keys` lists."""


def model_at(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> type[Section] | None:
    """Returns the pydantic model of the table at a place; None if there is no such table or its `source` is unknown."""
    if root is Config and place and place[0] == "task":
        if len(place) != 2:
            return None
        task = value_at(data, place)
        return TASK_MODELS.get(task.get("source", "")) if isinstance(task, Mapping) else None
    inner: Any = root
    for name in place:
        inner = _step(inner, name)
    return _section(inner)


def _step(annotation: Any, name: str | int) -> Any:
    """Returns the type of entry `name` in a section, dict or list of type `annotation`; None if there is no such
    entry."""
    if section := _section(annotation):
        field = section.model_fields.get(str(name))
        return field.annotation if field else None
    arms = {get_origin(arm): get_args(arm) for arm in (annotation, *get_args(annotation))}
    return arms[dict][1] if dict in arms else arms[list][0] if list in arms else None


def _section(annotation: Any) -> type[Section] | None:
    arms = (annotation, *get_args(annotation)) if get_origin(annotation) not in (dict, list) else ()
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, Section)), None)


def field_at(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> FieldInfo | None:
    """Returns the pydantic field of the key at a place; None if no known table has this key."""
    model = model_at(place[:-1], data, root)
    return model.model_fields.get(str(place[-1])) if model else None


def value_at(data: Any, place: Path) -> Any:
    """Returns the value at a place in `data`, or MISSING if there is no value."""
    for name in place:
        try:
            data = data[name]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return data


def is_free(place: Path) -> bool:
    """Returns whether the value at a place may change when a run is resumed."""
    return place[0] != "task" and _is_marked(field_at(place, {}), "free")


def is_hidden(field: FieldInfo) -> bool:
    """Returns whether a section is only for tests, and therefore neither listed nor documented."""
    return _is_marked(field, "hidden")


def _is_marked(field: FieldInfo | None, mark: str) -> bool:
    extra = field.json_schema_extra if field else None
    return isinstance(extra, dict) and bool(extra.get(mark))


def accepts(field: FieldInfo | None, kind: type | None) -> bool:
    """Returns whether a field accepts values of type `kind`; if `kind` is None, whether its key may be absent."""
    return field is not None and _accepts(field.annotation, kind)


def _accepts(annotation: Any, kind: type | None) -> bool:
    wanted = type(None) if kind is None else kind
    if annotation is wanted or get_origin(annotation) is wanted:
        return True
    if get_origin(annotation) is Literal:
        return kind is not None and any(isinstance(choice, kind) for choice in get_args(annotation))
    alternatives = () if get_origin(annotation) in (list, dict) else get_args(annotation)
    return any(_accepts(alternative, kind) for alternative in alternatives)


def is_switch(key: str) -> bool:
    """Returns whether a dotted key takes true or false, so that a command line may give it without a value."""
    section, *_, name = key.replace("-", "_").split(".")
    if section == "task":
        return any(accepts(model.model_fields.get(name), bool) for model in TASK_MODELS.values())
    return accepts(field_at((section, name), {}), bool)


def leaves(data: Any, place: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields (place, value) of every key, in order. Enters tables up to three names deep, and the list of tasks. Deeper
    tables and other lists are yielded whole, as values."""
    if isinstance(data, Mapping) and len(place) < 3:
        for name, value in data.items():
            yield from leaves(value, (*place, name))
    elif isinstance(data, list) and place == ("task",):
        for index, value in enumerate(data):
            yield from leaves(value, (*place, index))
    else:
        yield place, data


def dotted(place: Path, data: Mapping[str, Any] | None = None) -> str:
    """Returns a place as users write it, such as `task.level`. If there is only one task, its index is left out."""
    tasks = (data or {}).get("task")
    if len(place) > 2 and place[:2] == ("task", 0) and isinstance(tasks, list) and len(tasks) == 1:
        place = ("task", *place[2:])
    return ".".join(str(name) for name in place)


def known_keys(root: type[Section] = Config) -> list[str]:
    """Returns every documented key, dotted, such as `batch.group_size`; keys of tasks have no index."""
    keys: dict[str, None] = {}
    for name, field in root.model_fields.items():
        if is_hidden(field):
            continue
        section = _section(field.annotation)
        is_task = root is Config and name == "task"
        models: Iterable[type[Section]] = TASK_MODELS.values() if is_task else [section] if section else []
        keys.update((f"{name}.{key}", None) for model in models for key in model.model_fields)
    return list(keys)


def suggest_key(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> str:
    """Returns advice about an unknown key: the nearest spelling, the section that has the key, or the allowed keys. If
    the key belongs only to tasks of another `source`, the advice lists the keys of this task's source."""
    name = str(place[-1])
    model = model_at(place[:-1], data, root)
    names = list(model.model_fields) if model else []
    if root is Config and model in TASK_MODELS.values() and f"task.{name}" in known_keys():
        source = value_at(data, (*place[:-1], "source"))
        return f'source = "{source}" has no key {name}, only {", ".join(key for key in names if key != "source")}'
    if near := nearest(name, names):
        return f"did you mean {near}?"
    elsewhere = [key for key in known_keys(root) if key.endswith(f".{name.replace('-', '_')}")]
    if elsewhere and (root is Config or not model):  # files of few sections have names such as `name` in many of them
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"the section has {', '.join(names)}"
