"""Reads a TOML file and the command line into a checked `Config`.

Overrides (keys on the command line) win over the file, and later overrides over earlier overrides. TOML has no null, so
a key that may be absent takes the text "none" instead. Every mistake raises a `UserError` that names file, line and
key.
"""

from __future__ import annotations

import copy
import difflib
import json
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from offbeat.config import secrets
from offbeat.config.explain import ValueOrigin, explain
from offbeat.config.keys import Path, accepts, dotted, field_at, is_switch, key_lines, leaves, value_at
from offbeat.config.migrations import migrated
from offbeat.config.schema import DEMO, ArithmeticTask, Config, Section
from offbeat.errors import UserError

AnySection = TypeVar("AnySection", bound=Section)
SWITCH_VALUES = ("true", "false", "none")
DATA = 'is data, not a configuration; name it in a configuration: [[task]] source = "file", path = "PATH"'
OTHER_KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".parquet"), DATA),
    ".py": 'is Python, not a configuration; name its function in a configuration: [[task]] reward = "PATH:NAME"',
}
"""Remedies for a file that is not a configuration, by its suffix."""
TOML_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def load(path: pathlib.Path | str | None, overrides: Sequence[str] = ()) -> Config:
    """Loads the configuration from a TOML file or a run's config.json; without a path, the built-in demo.

    `overrides` are words of a command line, such as `--batch.group-size 16`, `--task.level=3` or `--run.exact`.
    """
    origin = ValueOrigin()
    data = copy.deepcopy(DEMO) if path is None else _read(pathlib.Path(path), origin)
    _one_list_of_tasks(data)
    _override(data, _pairs(overrides), origin)
    return _validate(data, origin)


def from_dict(data: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """Makes a configuration from a dict; keys of `overrides` are dotted keys, or sections whose values are dicts."""
    plain = copy.deepcopy(dict(data))
    _one_list_of_tasks(plain)
    for key, value in (overrides or {}).items():
        nested = isinstance(value, Mapping) and "." not in key and key != "task"
        for name, inner in value.items() if nested else [("", value)]:
            _put(plain, _place(plain, f"{key}.{name}".strip(".")), inner, key)
    _one_list_of_tasks(plain)
    return _validate(plain, ValueOrigin(from_python=True))


def load_as(
    path: pathlib.Path | str, root: type[AnySection], refusal: Callable[[Mapping[str, Any]], str] | None = None
) -> tuple[AnySection, ValueOrigin]:
    """Loads a TOML file, such as a cluster's, into the pydantic model `root`; also returns where its values came from,
    for errors. `refusal` takes the file's content and returns what is wrong with the file as a whole, or ""."""
    origin = ValueOrigin(root=root)
    data = _read(pathlib.Path(path), origin)
    if refusal is not None and (why := refusal(data)):
        raise UserError(f"{path}: {why}")
    try:
        return root.model_validate(data), origin
    except ValidationError as error:
        raise explain(error, data, origin) from None


def resolved(config: Config) -> dict[str, Any]:
    """Returns the value of every key of a configuration, including defaults, as plain JSON data."""
    return config.model_dump(mode="json")


def typed_keys(overrides: Sequence[str]) -> dict[str, str | None]:
    """Returns the texts of the values in `overrides` (words of a command line), by dotted key; None for a key without a
    text, such as `--run.exact`."""
    return {key.replace("-", "_"): text for key, text in _pairs(overrides)}


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into words that are not overrides, and overrides such as `--batch.group-size 16`."""
    rest: list[str] = []
    overrides: list[str] = []
    at = 0
    while at < len(words):
        key, equals, _ = words[at].partition("=")
        if not (key.startswith("--") and "." in key):
            rest.append(words[at])
        else:
            overrides.append(words[at])
            after = words[at + 1] if at + 1 < len(words) else "--"
            # After a switch, a word that is no value of it is an argument of its own, such as the configuration's path.
            if not equals and (_is_switch_value(after) if is_switch(key[2:]) else not after.startswith("--")):
                overrides.append(after)
                at += 1
        at += 1
    return rest, overrides


def _is_switch_value(word: str) -> bool:
    return word in SWITCH_VALUES or isinstance(_toml(word), int | float)


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str | None]]:
    """Returns the dotted keys in `overrides` (words of a command line), as typed, each with the text of its value; None
    for a key without a text, such as `--run.exact`."""
    found: list[tuple[str, str | None]] = []
    for word in overrides:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            found.append((key, text if equals else None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
        else:
            raise UserError(f"{word} belongs to no key; write each key and its value as --section.key value")
    return found


def _read(path: pathlib.Path, origin: ValueOrigin) -> dict[str, Any]:
    if path.suffix in OTHER_KINDS and path.is_file():
        raise UserError(f"{path}: {OTHER_KINDS[path.suffix].replace('PATH', str(path))}")
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        beside = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        nearest_first = difflib.get_close_matches(path.name, beside, n=4, cutoff=0.0)
        hint = f"; its folder has {', '.join(nearest_first)}" if beside else ""
        raise UserError(f"{path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}; give a readable TOML file") from error
    origin.file = str(path)
    try:
        if path.suffix == ".json":
            return migrated(
                secrets.restored(json.loads(text), secrets.load(path.with_name(secrets.SECRETS))), str(path)
            )
        data = tomllib.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: is not JSON: {error.msg}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(_toml_mistake(path, text, str(error))) from error
    origin.lines = key_lines(text)
    return data


def _toml_mistake(path: pathlib.Path, text: str, message: str) -> str:
    found = TOML_PLACE.search(message)
    line = int(found.group(1)) if found and found.group(1) else text.count("\n") + 1
    lines = text.splitlines()
    near = f" near {lines[line - 1].strip()!r}" if line <= len(lines) and lines[line - 1].strip() else ""
    reason = TOML_PLACE.sub("", message)
    return f"{path}:{line}: is not TOML{near}: {reason[:1].lower()}{reason[1:]}"


def _one_list_of_tasks(data: dict[str, Any]) -> None:
    """Turns a single task, written as the table [task], into a list of one task, as if written [[task]]."""
    if isinstance(data.get("task"), Mapping):
        data["task"] = [data["task"]]


def _override(data: dict[str, Any], given: Iterable[tuple[str, str | None]], origin: ValueOrigin) -> None:
    # Sources first, because they decide which other keys are allowed.
    for key, text in sorted(given, key=lambda pair: not pair[0].endswith(".source")):
        place = _place(data, key.replace("-", "_"))
        _put(data, place, _parse(place, data, key, text), f"--{key}")
        origin.typed[place] = key


def _place(data: dict[str, Any], key: str) -> Path:
    """Returns the place in `data` of a dotted key. A key without an index, such as `task.level`, belongs to the only
    task. If the index is one past the last task, an empty task is added to `data`."""
    names = key.split(".")
    if names[0] != "task" or len(names) < 2:
        return tuple(names)
    tasks = data.setdefault("task", [{"source": ArithmeticTask().source}])
    if names[1].isdigit():
        index = int(names[1])
        if index > len(tasks):
            raise UserError(f"--{key}: there is no task.{len(tasks)} yet; give the next task that number")
        if index == len(tasks):
            tasks.append({})
        return ("task", index, *names[2:])
    if len(tasks) != 1:
        raise UserError(f"--{key}: there are {len(tasks)} tasks; name one, as in --task.0.{'.'.join(names[1:])}")
    return ("task", 0, *names[1:])


def _put(data: dict[str, Any], place: Path, value: Any, key: str) -> None:
    inner: Any = data
    for name in place[:-1]:
        if isinstance(inner, dict):
            inner = inner.setdefault(name, {})
        elif isinstance(inner, list) and isinstance(name, int):
            inner = inner[name]
    if not isinstance(inner, dict):
        raise UserError(f"{key}: {dotted(place[:-1])} is a single value and has no keys of its own; set it by itself")
    inner[place[-1]] = value


def _parse(place: Path, data: Mapping[str, Any], key: str, text: str | None) -> Any:
    """Returns the value that a command-line text gives to the key at `place`: the text parsed as TOML, or the text
    itself if it is not TOML or the key takes text but no number. Commas separate items of a list. No text means
    True."""
    known = field_at(place, data)
    if text is None:
        if known is not None and not accepts(known, bool):
            raise UserError(f"--{key} needs a value, as in --{key} VALUE")
        return True
    value = _toml(text)
    takes_numbers = accepts(known, float) or accepts(known, int)
    if accepts(known, str) and not isinstance(value, str) and not takes_numbers:
        return text
    if accepts(known, list) and isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def _toml(text: str) -> Any:
    """Returns the value of a text written in TOML, or the text itself if it is not TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _nothing(data: dict[str, Any]) -> None:
    """Replaces the value "none" by None in all keys of `data` that may be absent."""
    for place, value in list(leaves(data)):
        if value == "none" and accepts(field_at(place, data), None):
            value_at(data, place[:-1])[place[-1]] = None


def _validate(data: dict[str, Any], origin: ValueOrigin) -> Config:
    _nothing(data)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, origin) from None
