"""Writes the tables of docs/configuration.md from the models: python scripts/make_configuration_page.py.

The demo's TOML and everything below the marker are made here, so that no key, range or default can grow stale; the rest
of the page is written by hand and left alone. A test compares the page with what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from offbeat.config.explain import alternatives_in_words, choices, describe, range_in_words, show
from offbeat.config.keys import TASK_MODELS, is_free, is_hidden
from offbeat.config.schema import DEMO, Config, Section, TaskConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
MARKER = "<!-- Everything below is made by scripts/make_configuration_page.py. -->\n"
DEMO_BLOCK = re.compile(r"(?<=the built-in demo, which is this:\n\n```toml\n).*?(?=```)", re.DOTALL)
HEAD = "| key | type | default | allowed | on resume | meaning |\n|---|---|---|---|---|---|\n"
TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", list: "list", dict: "table"}
NAME_PATTERN = "letters, digits, `.`, `_`, `-`; a letter or digit first"


def rendered(page: str) -> str:
    """The page with what is made here made anew."""
    by_hand, marker, _ = page.partition(MARKER)
    assert marker, f"{PAGE} has lost its marker, {MARKER!r}"
    by_hand, found = DEMO_BLOCK.subn(lambda _: demo(), by_hand)
    assert found == 1, f"{PAGE} has lost the demo's TOML"
    return f"{by_hand}{MARKER}\n{tables()}"


def demo() -> str:
    """The built-in demo as a TOML file."""
    parts = []
    for section, content in DEMO.items():
        head = f"[[{section}]]" if isinstance(content, list) else f"[{section}]"
        for keys in content if isinstance(content, list) else [content]:
            assert isinstance(keys, Mapping)
            parts.append("\n".join([head, *(f"{key} = {show(value)}" for key, value in keys.items()), ""]))
    return "\n".join(parts)


def tables() -> str:
    meanings = {section: {key: (default, text) for key, default, text in rows} for section, rows in describe()}
    parts = []
    for name, field in Config.model_fields.items():
        if is_hidden(field):
            continue
        if name == "task":
            parts += _task_tables(meanings)
        else:
            assert isinstance(field.annotation, type)
            rows = [_row(key, known, meanings[name][key], (name, key)) for key, known in _fields(field.annotation)]
            parts.append(f"## `[{name}]`\n\n{HEAD}{''.join(rows)}")
    return "\n".join(parts)


def _task_tables(meanings: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    """One table for what all sources share, one for each kind of source."""
    shared = dict(_fields(TaskConfig))
    sources: dict[type[TaskConfig], list[str]] = {}
    for source, model in TASK_MODELS.items():
        sources.setdefault(model, []).append(source)
    parts: list[str] = []
    for model, names in sources.items():
        described = meanings[f"task, source = {show(names[0])}"]
        if not parts:
            rows = [_row(key, field, described[key], ("task", key)) for key, field in shared.items()]
            what = "Each `[[task]]` is a source of prompts; its `source` says which, and which further keys it takes.\n"
            parts.append(f"## `[[task]]`\n\n{what}\n{HEAD}{''.join(rows)}")
        own = [(key, field) for key, field in _fields(model) if key not in shared and key != "source"]
        rows = [_row(key, field, described[key], ("task", key)) for key, field in own]
        title = " or ".join(f"`source = {show(name)}`" for name in names)
        parts.append(f"### {title}\n\n{HEAD}{''.join(rows)}")
    return parts


def _fields(model: type[Section]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


def _row(key: str, field: FieldInfo, described: tuple[str, str], place: tuple[str, ...]) -> str:
    default, meaning = described
    shown = {"-": "must be given", "none": "none"}.get(default, f"`{default}`")
    cells = [
        f"`{key}`",
        _type(field.annotation),
        shown,
        _allowed(field),
        "free" if is_free(place) else "fixed",
        meaning,
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        *first, last = [_type(inner) for inner in get_args(annotation)]
        return f"{', '.join(first)} or {last}".replace("true or false or", "true, false or")
    if annotation is type(None):
        return "none"
    if get_origin(annotation) is Literal:
        return _type(type(get_args(annotation)[0]))
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return "list of text"
    return TYPES[get_origin(annotation) or annotation]


def _allowed(field: FieldInfo) -> str:
    if text := alternatives_in_words(field):
        return re.sub(r'("\w+")', r"`\1`", text)
    if words := choices(field):
        return ", ".join(f"`{show(word)}`" for word in words)
    if bool in (field.annotation, *get_args(field.annotation)):
        return "`true`, `false`"
    if any(getattr(constraint, "pattern", None) for constraint in field.metadata):
        return NAME_PATTERN
    return range_in_words(field).replace(str(2**31), "2^31") or "any"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
