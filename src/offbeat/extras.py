"""Optional packages: imported where they are used, with an error that says how to install what is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from offbeat.errors import UserError


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Imports an optional package, or names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needed_by} needs the package {module} ({error}): pip install 'offbeat[{extra}]'") from error


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Inside, a package that is not loaded yet counts as not installed: whoever would load it just in case does not."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # what makes an import fail at once
    try:
        yield
    finally:
        del sys.modules[package]
