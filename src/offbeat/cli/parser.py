"""argparse, with one-line errors that suggest the nearest spelling of a mistyped option."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from offbeat.config.keys import known_keys
from offbeat.config.other_names import known_elsewhere
from offbeat.errors import UserError
from offbeat.spelling import nearest


class Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print its usage and exit."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Intermixed, or an option between two positional arguments would hide the second one if the first is optional.
        known, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            raise UserError(f"{unknown[0]}: {self._about(unknown[0].split('=')[0])}")
        return known

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def _about(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{self.prog} takes no further argument; see {self.prog} --help"
        name = word.lstrip("-").replace("-", "_")
        section = self.prog.split()[-1]  # `offbeat eval` means the keys of [eval] before others
        if f"{section}.{name}" in known_keys():
            return f"unknown option; did you mean --{section}.{name}?"
        if elsewhere := known_elsewhere([name], before="--"):
            return f"unknown option; {elsewhere}"
        keys = [key for key in known_keys() if key.split(".")[1] == name]
        near = f"--{keys[0]}" if keys else nearest(word, list(self._option_string_actions))
        return f"unknown option; did you mean {near}?" if near else f"unknown option; see {self.prog} --help"
