"""Finds a user's function by `module:function` or `file.py:function`, and determines which arguments it takes.

A missing file or function, a module that cannot be imported, or a parameter for which there is no argument raises a
one-line `UserError` before training starts. Uses only the standard library, because reward processes import this module
and must start fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import UserError
from offbeat.spelling import a_kind, suggest

Function = Callable[..., Any]
IPYTHON_CELL = re.compile(r"<ipython-input-(\d+)-")


def locate(spec: str, key: str) -> Function:
    """Returns the function that `spec` names; `key` is the configuration key to name in errors."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise UserError(f"{key} = {spec!r}: write module:function or file.py:function")
    module = _load_file(Path(where), spec, key) if where.endswith(".py") else _load_module(where, spec, key)
    function = getattr(module, name, None)
    if function is None:
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"{key} = {spec!r}: {where} has no function {name!r}; {suggest(name, own, 'it has')}")
    if not callable(function):
        raise UserError(f"{key} = {spec!r}: {name} is {a_kind(function)}, not a function")
    return function


def accepted_arguments(
    function: Function, offered: Sequence[str], label: str, other_names: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Returns the names in `offered` that a function takes as keyword arguments. Raises `UserError` if it takes none of
    them, or requires an argument that is not among them; `label` names the function in errors. `other_names` maps names
    that other programs use to those in `offered`, for hints."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{label}: its parameters cannot be read ({error}); wrap it in a function defined with def"
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(offered)
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY:
            raise UserError(
                f"{label}: parameter {p.name!r} is positional-only, but arguments are passed by keyword; remove the / "
                "from its parameters"
            )
        if p.name not in offered and p.default is p.empty and p.kind is not p.VAR_POSITIONAL:
            known = (other_names or {}).get(p.name, p.name)
            raise UserError(f"{label}: no argument is passed for parameter {p.name!r}; {suggest(known, offered)}")
    accepted = {p.name for p in parameters}
    if not accepted & set(offered):
        raise UserError(f"{label}: its parameters must include at least one of {', '.join(offered)}")
    return tuple(name for name in offered if name in accepted)


def is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def one_line(error: BaseException) -> str:
    """Formats an error as one line: type, message, and the file and line in which it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):
        text = f"SyntaxError: {error.msg} ({_place(error.filename or '?', error.lineno)})"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            text += f" ({_place(frames[-1].filename, frames[-1].lineno)})"
    return " ".join(text.split())


def _place(file: str, line: int | None) -> str:
    """Returns a file's name and a line, such as `reward.py:7`. Instead of a notebook's file name, returns `notebook
    cell`, because that name is generated: a number in a folder `ipykernel_PID`, or `<ipython-input-CELL-HASH>`."""
    if number := IPYTHON_CELL.match(file):
        return f"notebook cell [{number.group(1)}], line {line}"
    path = Path(file)
    return f"notebook cell, line {line}" if path.parent.name.startswith("ipykernel_") else f"{path.name}:{line}"


def _load_file(path: Path, spec: str, key: str) -> ModuleType:
    if not path.is_file():
        near = suggest(path.name, sorted(p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise UserError(f"{key} = {spec!r}: there is no file {path}" + (f"; {near}" if near else ""))
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script, so that the file can import its neighbours
    # A unique module name: a file called json.py must not replace the standard library's module.
    module_name = f"_offbeat_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None, path
    assert found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UserError(f"{key} = {spec!r}: {path} fails on import: {one_line(error)}") from error
    return module


def _load_module(name: str, spec: str, key: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"{key} = {spec!r}: there is no module {error.name!r} in this folder or among the installed "
                "packages; start offbeat in the folder that holds it, or write file.py:function"
            ) from error
        raise UserError(f"{key} = {spec!r}: module {name} fails on import: {one_line(error)}") from error
    except Exception as error:
        raise UserError(f"{key} = {spec!r}: module {name} fails on import: {one_line(error)}") from error
