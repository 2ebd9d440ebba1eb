"""The typed configuration: its keys, how they are read, and a summary of the run that results. Imports nothing slow."""

from offbeat.config import secrets
from offbeat.config.changes import Change, fixed_changes, fixed_keys, free_changes
from offbeat.config.load import from_dict, load, resolved
from offbeat.config.schema import DEMO, Config
from offbeat.config.summary import summarise

__all__ = [
    "DEMO",
    "Change",
    "Config",
    "fixed_changes",
    "fixed_keys",
    "free_changes",
    "from_dict",
    "load",
    "resolved",
    "secrets",
    "summarise",
]
