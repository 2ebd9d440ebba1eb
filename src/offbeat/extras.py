"""Imports optional packages where they are used, with an error that says how to install a missing one; and imports
large packages faster."""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import UserError


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Imports an optional module. If it is missing, the error says what needs it and which extra of pip installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needed_by} needs the package {module} ({error}): pip install 'offbeat[{extra}]'") from error


owns_process = False
"""Whether this process does only Offbeat's work. False in a Python program or notebook, which may do other work too."""


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Makes imports of `package` fail within the block, so that libraries behave as if `package` were not installed.
    Does nothing if `package` is already loaded. Also does nothing unless `owns_process` is true, because these
    libraries would behave so after the block, too, when other work in this process may need `package`."""
    if not owns_process or package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # makes an import fail at once
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def importing_faster() -> Iterator[None]:
    """Makes imports of torch and transformers within the block faster: without search for garbage (`collecting_later`),
    and without modules that only few of their functions need (`deferring`)."""
    with collecting_later(), deferring():
        yield


@contextmanager
def collecting_later() -> Iterator[None]:
    """Stops Python's search for cyclic garbage within the block. An import of torch and transformers makes a million
    objects and hardly any garbage, and takes an eighth longer with the search.

    Afterwards all objects count as old, so that the searches after the block do not visit them, which would take half a
    second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # otherwise `unfreeze` would undo what the program has frozen
                gc.freeze()
                gc.unfreeze()  # puts them into the oldest generation
            gc.enable()


DEFERRED = {"boto3": (), "scipy.optimize": ("linear_sum_assignment",)}
"""Modules that transformers imports, directly or through accelerate, but that training of a language model never uses;
and the functions that it imports from them by name. The two take half a second."""


@contextmanager
def deferring() -> Iterator[None]:
    """Defers imports of the modules in `DEFERRED` within the block until they are needed, in the block or at any time
    later. Does nothing for a module that is loaded already or not installed."""
    stand_ins = {}
    for name, functions in DEFERRED.items():
        package, *rest = name.split(".")
        spec = None if name in sys.modules else find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folders = [str(Path(folder, *rest)) for folder in spec.submodule_search_locations]
            stand_ins[name] = _Deferred(name, functions, folders)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


class _Deferred(ModuleType):
    """Stands in for the package `name`, whose submodules lie in `folders`. Imports it when one of `functions` is called
    or anything else is looked up."""

    def __init__(self, name: str, functions: tuple[str, ...], folders: list[str]):
        super().__init__(name)
        # Imports look up the first two, and `inspect` looks up the file of every module.
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), folders
        self.__file__ = str(Path(folders[0], "__init__.py"))
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name) if name in self._functions else getattr(self._load(), name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._load(), name)(*arguments, **named)

    def _load(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


def load_ahead(package: str, library: str) -> None:
    """Starts to load a shared library of `package`, which is not imported, in a thread. Python's own imports go on
    meanwhile, and the import of `package` finds the library loaded. Does nothing if there is no such library."""
    spec = None if package in sys.modules else find_spec(package)
    files = [Path(folder) / library for folder in (spec and spec.submodule_search_locations) or ()]
    if found := next((file for file in files if file.is_file()), None):
        threading.Thread(target=_load_library, args=(found,), name=f"offbeat-load-{package}").start()


def _load_library(file: Path) -> None:
    with suppress(OSError):  # the import of the package then reports it
        ctypes.CDLL(str(file))
