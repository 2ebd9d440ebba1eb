"""Imports optional packages where they are used; the error for a missing package says how to install it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from offbeat.errors import UserError


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Imports an optional module. If it is missing, the error says what needs it and which extra of pip installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needed_by} needs the package {module} ({error}): pip install 'offbeat[{extra}]'") from error


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Makes imports of `package` fail within the block, so that libraries take it for not installed; does nothing if it
    is already loaded."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # makes an import fail at once
    try:
        yield
    finally:
        del sys.modules[package]
