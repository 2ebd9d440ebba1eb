"""The typed configuration: what may be said, how it is read, and what follows from it. Imports nothing heavy."""

from offbeat.config import secrets
from offbeat.config.arithmetic import arithmetic
from offbeat.config.changes import Change, fixed_changes, fixed_keys, free_changes
from offbeat.config.load import from_dict, load, resolved
from offbeat.config.models import DEMO, Config

__all__ = [
    "DEMO",
    "Change",
    "Config",
    "arithmetic",
    "fixed_changes",
    "fixed_keys",
    "free_changes",
    "from_dict",
    "load",
    "resolved",
    "secrets",
]
