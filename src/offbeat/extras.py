"""Optional packages: imported where they are used, with an error that says how to install what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from offbeat.errors import UserError


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Imports an optional package, or names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{needed_by} needs the package {module} ({error}): pip install 'offbeat[{extra}]'") from error
