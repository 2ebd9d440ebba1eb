"""Explains a wrong configuration to the user in one line, made from pydantic's errors.

    run.toml:7: batch.group_sise = 16: unknown key; did you mean group_size?
    --optimizer.schedule = "cosin": must be "constant", "linear" or "cosine"; did you mean "cosine"?

The first mistake in a file is explained; other mistakes are only named.
"""

from __future__ import annotations

import ast
import datetime
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offbeat.config.keys import TASK_MODELS, Path, accepts, dotted, field_at, is_hidden, suggest_key, value_at
from offbeat.config.migrations import removed_at
from offbeat.config.other_names import SECTIONS, known_elsewhere, nearest_argument
from offbeat.config.schema import Config, Section
from offbeat.config.secrets import shown_value
from offbeat.errors import UserError
from offbeat.spelling import nearest

LONGEST_VALUE = 60
MAX_NAMED = 4
"""Largest number of mistakes that an error mentions: it explains the first and names the others."""
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "dict": "a table",
    "model": "a table",
}
"""Kind of value that a key takes, by the first word of pydantic's error type."""
KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number with a fraction"),
    (str, "text"),
    ((list, tuple), "a list"),
    (Mapping, "a table"),
    ((datetime.date, datetime.time), "a date or time"),
)
KNOWN_KINDS = (bool, int, float, str, list, tuple, datetime.date, datetime.time)
"""Types of values that errors show; the text of other objects, such as functions and datasets, says little."""
HIDDEN_CHOICES = ("paced",)
"""Values only for tests, which errors and documentation do not list."""
FIRST_KEYS = {
    "checkpoint": "every",
    "eval": "every",
    "loss": "name",
    "optimizer": "lr",
    "rollout": "engine",
    "run": "name",
    "schedule": "mode",
}
"""Key that was probably meant if a Python call gave a single value for a section, as in `loss="dapo"`; by section."""
RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
LEADING_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+) = ")


@dataclass
class ValueOrigin:
    """Where the values of a configuration came from: a file, with the line of each key, or the command line."""

    file: str | None = None
    lines: Mapping[Path, int] = field(default_factory=dict)
    typed: dict[Path, str] = field(default_factory=dict)
    """Keys given on the command line, as the user typed them, by their place in the configuration."""
    root: type[Section] = Config
    """Pydantic model of the whole file."""
    from_python: bool = False
    """Whether the values are arguments of a call from Python, such as `offbeat.train`."""

    def line(self, place: Path) -> int | None:
        """Returns the line of a key, or of the nearest table around it; None: unknown."""
        while place:
            if place in self.lines:
                return self.lines[place]
            if place[:2] == ("task", 0) and ("task", *place[2:]) in self.lines:  # an only task, written as [task]
                return self.lines[("task", *place[2:])]
            place = place[:-1]
        return None

    def typed_at(self, place: Path) -> Path | None:
        """Returns the place of the first command-line key that equals `place`, lies inside it or contains it; None if
        there is no such key."""
        shared = (p for p in self.typed if p[: len(place)] == place or place[: len(p)] == p)
        return next(shared, None)

    def before(self, place: Path) -> str:
        """Returns the beginning of an error message about the key at `place`: "--" if it is from the command line, else
        the file and, if known, the line. Empty if there is no file."""
        if self.typed_at(place):
            return "--"
        if self.file is None:
            return ""
        line = self.line(place)
        return f"{self.file}:{line}: " if line else f"{self.file}: "


def explain(error: ValidationError, data: Mapping[str, Any], origin: ValueOrigin) -> UserError:
    """Returns the error to raise for a configuration that failed pydantic's validation. Its message explains the first
    mistake in one line and names others."""
    mistakes = [_Mistake(item, data, origin) for item in error.errors(include_url=False)]
    found = list({mistake.place: mistake for mistake in mistakes}.values())  # a key with alternatives has several
    found.sort(key=lambda mistake: mistake.order)
    others = ", ".join([mistake.name for mistake in found[1:MAX_NAMED]] + ["…"] * (len(found) > MAX_NAMED))
    more = f" (and {len(found) - 1} more: {others})" if others else ""
    return UserError(found[0].text() + more)


class _Mistake:
    def __init__(self, item: Mapping[str, Any], data: Mapping[str, Any], origin: ValueOrigin):
        self.kind: str = item["type"]
        self.context: Mapping[str, Any] = item.get("ctx") or {}
        self.data, self.origin = data, origin
        place: Path = tuple(item["loc"])
        if place[:1] == ("task",) and len(place) > 2:
            place = (*place[:2], *place[3:])  # pydantic inserts the chosen source
        if self.kind == "union_tag_invalid":
            place = (*place, "source")
        if self.kind == "value_error" and (key := LEADING_KEY.match(str(self.context["error"]))):
            place = tuple(key.group(1).split("."))
        if len(place) == 3 and (known := field_at(place[:2], data, origin.root)) and alternatives_in_words(known):
            place, self.kind = place[:2], "alternatives"  # pydantic appends the alternative that did not fit
        self.place = place

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Sort key of a mistake: whether a key is missing, whether the line is unknown, and the line. Missing keys come
        last, because a misspelt key often explains them."""
        line = self.origin.line(self.place)
        return self.kind in ("missing", "union_tag_not_found"), line is None, line or 0

    @property
    def name(self) -> str:
        """The mistaken key, with its line if that is known."""
        line = None if self.origin.typed_at(self.place) else self.origin.line(self.place)
        return dotted(self.place, self.data) + (f" in line {line}" if line else "")

    def text(self) -> str:
        if self.kind == "value_error":  # a check across keys, whose message is complete
            return self.origin.before(self.place) + str(self.context["error"])
        place, value = self.place, value_at(self.data, self.place)
        if isinstance(value, Mapping) and (typed := self.origin.typed_at(place)):
            place, value = typed, value_at(self.data, typed)
        name = dotted(place, self.data)
        if isinstance(value, Mapping):
            name = "[[task]]" if place[0] == "task" and len(place) == 2 else f"[{name}]"
        elif value is None or isinstance(value, KNOWN_KINDS):
            name = f"{name} = {show(value)}"
        return f"{self.origin.before(self.place)}{name}: {self._what()}"

    def _what(self) -> str:
        value, known = value_at(self.data, self.place), self._field(self.place)
        if self.kind == "extra_forbidden":
            if removed := removed_at(self.place) if self.origin.root is Config else None:
                return f"this key was removed in {removed.since}; take it out ({removed.instead})"
            what = "unknown section" if len(self.place) == 1 and isinstance(value, Mapping) else "unknown key"
            python = self.origin.from_python
            if self.origin.root is Config and (elsewhere := known_elsewhere(self.place, value, in_python=python)):
                return f"{what}; {elsewhere}"
            if what == "unknown section" and self.origin.root is Config and (ours := SECTIONS.get(str(self.place[0]))):
                return f"{what}; its settings are in {ours} here"
            if python and len(self.place) == 1 and (argument := nearest_argument(str(self.place[0]))):
                return f"{what}; did you mean {argument}?"
            return f"{what}; {suggest_key(self.place, self.data, self.origin.root)}"
        if self.kind == "literal_error":
            return _choose(value, choices(known if known else self._field(self.place[:-1])))
        if self.kind == "alternatives" and known:
            return f"must be {alternatives_in_words(known)}"
        if self.kind == "union_tag_invalid":
            return _choose(value, list(TASK_MODELS))
        if self.kind == "union_tag_not_found":
            return self._no_source(value)
        if self.kind == "missing":
            return "is missing; give it a value"
        if self.kind in RANGE_ERRORS and known:
            return f"must be {range_in_words(known)}"
        if self.kind == "string_pattern_mismatch":
            return "must consist of letters, digits, '.', '_' and '-', with a letter or digit first"
        if self.kind == "too_short":
            return f"must have {self.context['min_length']} or more entries"
        if self.kind == "finite_number":
            return "must be a finite number"
        return self._wrong_type(value)

    def _field(self, place: Path) -> FieldInfo | None:
        return field_at(place, self.data, self.origin.root)

    def _no_source(self, value: Any) -> str:
        near = [key for key in value if nearest(str(key), ["source"])] if isinstance(value, Mapping) else []
        hint = f"; is {near[0]} a misspelling of it?" if near else ""
        return f"source is missing{hint}; it must be {_either(list(TASK_MODELS))}"

    def _wrong_type(self, value: Any) -> str:
        word = self.kind.split("_")[0]
        wanted = WANTED.get(word)
        if wanted is None:
            return f"cannot be understood ({self.kind.replace('_', ' ')})"
        text = f"wants {wanted}, not {_kind_of(value)}"
        if word in ("int", "float", "bool") and isinstance(value, str) and _reads_as(value, word):
            return f"{text}; write it without quotes"
        if word == "string" and isinstance(value, (bool, int, float, datetime.date, datetime.time)):
            return f"{text}; put it in quotes"
        if self.place[0] == "task" and self.place[-1] == "path":
            return f"{text}; rows and datasets in memory are given as offbeat.train(..., task=rows)"
        if word == "model" and self.origin.from_python and (known := self._field(self.place)):
            section = _as_section(str(self.place[0]), known, value)
            return f"wants a dict of its keys, not {_kind_of(value)}; write {section}"
        return text


def _as_section(name: str, known: FieldInfo, value: Any) -> str:
    """Returns an example of how to pass the section `name` from Python, such as `loss={"name": "dapo"}`. It sets the
    section's key in `FIRST_KEYS` to `value`, if that key accepts such a value. Otherwise it shows a key of the section
    with its default, or with `...` if no key has one."""
    assert isinstance(known.annotation, type)
    fields: Mapping[str, FieldInfo] = known.annotation.model_fields
    key = FIRST_KEYS.get(name, "")
    if not (key and accepts(fields[key], type(value))):
        examples = {key: one.default for key, one in fields.items() if one.default not in (None, PydanticUndefined)}
        key, value = next(iter(examples.items()), (next(iter(fields)), ...))
    shown = "..." if value is ... else show(value) if isinstance(value, str) else repr(value)
    return f"{name}={{{show(key)}: {shown}}}"


def show(value: Any) -> str:
    """Returns a value as text, written as in TOML, without secrets, and shortened if it is long."""
    text = json.dumps(shown_value(value), ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def range_in_words(known: FieldInfo) -> str:
    """Returns in words the range of numbers that a field allows, such as `1 to 5` or `0 or more and less than 1`."""
    low = next((m for m in known.metadata if isinstance(m, Ge | Gt)), None)
    high = next((m for m in known.metadata if isinstance(m, Le | Lt)), None)
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"{low.ge} to {high.le}" if low.ge != high.le else f"{low.ge}"
    words = []
    if low:
        words.append(f"{low.ge} or more" if isinstance(low, Ge) else f"more than {low.gt}")
    if high:
        words.append(f"at most {high.le}" if isinstance(high, Le) else f"less than {high.lt}")
    return " and ".join(words)


def alternatives_in_words(known: FieldInfo) -> str:
    """Returns in words the values that a field of numbers and words allows, such as `1 or more, or "auto"`; "" for any
    other field."""
    arms = get_args(known.annotation)
    ranges = [range_in_words(inner) for arm in arms if get_origin(arm) is Annotated for inner in arm.__metadata__]
    words = [word for arm in arms if get_origin(arm) is Literal for word in get_args(arm)]
    return f"{ranges[0]}, or {_either(words)}" if ranges and words else ""


def choices(known: FieldInfo | None) -> list[str]:
    """Returns the words that a field allows; empty if it is not limited to certain words."""
    annotation: Any = known.annotation if known else None
    while annotation is not None and (inner := get_args(annotation)):
        if all(isinstance(choice, str) for choice in inner):
            return [choice for choice in inner if choice not in HIDDEN_CHOICES]
        annotation = inner[0]
    return []


def _choose(value: Any, allowed: list[str]) -> str:
    near = nearest(value, allowed) if isinstance(value, str) and len(allowed) > 1 else None
    return f"must be {_either(allowed)}" + (f"; did you mean {show(near)}?" if near else "")


def _either(words: list[str]) -> str:
    """Returns the words as a choice, such as `"a", "b" or "c"`."""
    *others, last = map(show, words)
    return f"{', '.join(others)} or {last}" if others else last


def _kind_of(value: Any) -> str:
    return next((word for kind, word in KINDS if isinstance(value, kind)), type(value).__name__)


def _reads_as(text: str, word: str) -> bool:
    if word == "bool":
        return text in ("true", "false")
    try:
        (int if word == "int" else float)(text)
    except ValueError:
        return False
    return True


def describe() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns (section, [(key, default, meaning)]) for every documented section; a required key has default "-"."""
    sections = []
    for name, info in Config.model_fields.items():
        if is_hidden(info):
            continue
        if name != "task":
            assert isinstance(info.annotation, type)
            sections.append((name, _keys(info.annotation)))
            continue
        for source, model in TASK_MODELS.items():
            sections.append((f"task, source = {show(source)}", _keys(model)))
    return sections


def _keys(model: type[Section]) -> list[tuple[str, str, str]]:
    sections = [parent for parent in reversed(model.__mro__) if issubclass(parent, Section)]
    meanings = {name: text for one in sections for name, text in _docs(one.__module__).get(one.__name__, [])}
    rows = []
    for name, info in model.model_fields.items():
        default = "-" if info.is_required() else "none" if info.default is None else show(info.default)
        rows.append((name, default, meanings.get(name, "")))
    return rows


@cache
def _docs(module: str) -> dict[str, list[tuple[str, str]]]:
    """Returns (field, docstring) for the documented fields of each class in a module's source."""
    found: dict[str, list[tuple[str, str]]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = [
                (field.target.id, " ".join(text.value.value.split()))
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ]
    return found
