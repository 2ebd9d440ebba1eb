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
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

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
