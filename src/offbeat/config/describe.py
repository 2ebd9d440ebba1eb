"""Lists every key with its default and its meaning, for `--help`, read from the models so that it cannot grow stale."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from offbeat.config.explain import show
from offbeat.config.keys import TASK_MODELS
from offbeat.config.models import Config
from offbeat.config.section import Section


def describe() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Sections, each with (key, default, meaning); a default of `-` means that there is none."""
    sections = []
    for name, field in Config.model_fields.items():
        if name != "task":
            assert isinstance(field.annotation, type)
            sections.append((name, _keys(field.annotation)))
            continue
        for source, model in TASK_MODELS.items():
            sections.append((f"task, source = {show(source)}", [row for row in _keys(model) if row[0] != "source"]))
    return sections


def _keys(model: type[Section]) -> list[tuple[str, str, str]]:
    meanings = {name: text for parent in reversed(model.__mro__) for name, text in _docs_of(parent)}
    rows = []
    for name, field in model.model_fields.items():
        default = "-" if field.is_required() else "none" if field.default is None else show(field.default)
        rows.append((name, default, meanings.get(name, "")))
    return rows


def _docs_of(parent: type) -> list[tuple[str, str]]:
    return _docs(parent.__module__).get(parent.__name__, []) if issubclass(parent, Section) else []


@cache
def _docs(module: str) -> dict[str, list[tuple[str, str]]]:
    """The text below each field of each class of a module's source."""
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
