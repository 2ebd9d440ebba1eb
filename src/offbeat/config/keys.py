"""Knows the keys of a file: which there are, which may change on resume, and which one a misspelling meant.

Places are tuples such as ("task", 0, "level"); what a table of `task` may hold depends on its `source`, so the data is
handed in beside the place. The file is a run's configuration, unless `root` names the model of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from offbeat.config.lines import Path
from offbeat.config.models import Config
from offbeat.config.section import Section
from offbeat.config.tasks import AnyTask, TaskConfig
from offbeat.spelling import nearest

MISSING = object()


def _task_models() -> dict[str, type[TaskConfig]]:
    union = get_args(AnyTask)[0]
    return {name: model for model in get_args(union) for name in get_args(model.model_fields["source"].annotation)}


TASK_MODELS = _task_models()
"""What a table of `task` may hold, by its `source`."""


def model_at(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> type[Section] | None:
    """The model of the table at a place; None where there is no such table, or no telling."""
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
    """What stands at a key of a section, of a table of tables or of a list of tables; None where nothing can."""
    if section := _section(annotation):
        field = section.model_fields.get(str(name))
        return field.annotation if field else None
    arms = {get_origin(arm): get_args(arm) for arm in (annotation, *get_args(annotation))}
    return arms[dict][1] if dict in arms else arms[list][0] if list in arms else None


def _section(annotation: Any) -> type[Section] | None:
    arms = (annotation, *get_args(annotation)) if get_origin(annotation) not in (dict, list) else ()
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, Section)), None)


def field_at(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> FieldInfo | None:
    """The field at a place; None for what is no key of a known table, such as an item of a list."""
    model = model_at(place[:-1], data, root)
    return model.model_fields.get(str(place[-1])) if model else None


def value_at(data: Any, place: Path) -> Any:
    """The value at a place, or MISSING."""
    for name in place:
        try:
            data = data[name]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return data


def is_free(place: Path) -> bool:
    """Whether the value there may change when a run is resumed."""
    field = field_at(place, {}) if place[0] != "task" else None
    extra = field.json_schema_extra if field else None
    return isinstance(extra, dict) and bool(extra.get("free"))


def accepts(field: FieldInfo | None, kind: type | None) -> bool:
    """Whether a field's type, or one of its alternatives, is `kind`; None asks whether it may be absent."""
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
    """Whether a dotted key is true or false, so that it may stand on a command line without a value."""
    section, *_, name = key.replace("-", "_").split(".")
    if section == "task":
        return any(accepts(model.model_fields.get(name), bool) for model in TASK_MODELS.values())
    return accepts(field_at((section, name), {}), bool)


def leaves(data: Any, place: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is a key's own, in order: tables are entered, and so is the list of tasks."""
    if isinstance(data, Mapping) and len(place) < 3:
        for name, value in data.items():
            yield from leaves(value, (*place, name))
    elif isinstance(data, list) and place == ("task",):
        for index, value in enumerate(data):
            yield from leaves(value, (*place, index))
    else:
        yield place, data


def dotted(place: Path, data: Mapping[str, Any] | None = None) -> str:
    """A place as users write it; the index of an only task is left out."""
    tasks = (data or {}).get("task")
    if len(place) > 2 and place[:2] == ("task", 0) and isinstance(tasks, list) and len(tasks) == 1:
        place = ("task", *place[2:])
    return ".".join(str(name) for name in place)


def known_keys(root: type[Section] = Config) -> list[str]:
    """Every key of a section there is, dotted; those of tasks without an index."""
    keys: dict[str, None] = {}
    for name, field in root.model_fields.items():
        section = _section(field.annotation)
        is_task = root is Config and name == "task"
        models: Iterable[type[Section]] = TASK_MODELS.values() if is_task else [section] if section else []
        keys.update((f"{name}.{key}", None) for model in models for key in model.model_fields)
    return list(keys)


def suggest_key(place: Path, data: Mapping[str, Any], root: type[Section] = Config) -> str:
    """What to say about an unknown key: the nearest spelling, the section it belongs to, or the keys there are."""
    name = str(place[-1])
    model = model_at(place[:-1], data, root)
    names = list(model.model_fields) if model else []
    if near := nearest(name, names):
        return f"did you mean {near}?"
    elsewhere = [key for key in known_keys(root) if key.endswith(f".{name.replace('-', '_')}")]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"allowed {', '.join(names)}"
