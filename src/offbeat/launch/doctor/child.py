"""One probe, in a process of its own: `python -m offbeat.launch.doctor.child NAME WORDS`.

Prints the probe's record as a line of JSON; or ends with status 1 and one line on standard error that says why not.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from types import TracebackType

from offbeat.errors import OffbeatError

PROBES = {
    "offbeat": "launch.doctor.software",
    "packages": "launch.doctor.software",
    "interpreter": "launch.doctor.software",
    "torch": "launch.doctor.models",
    "model": "launch.doctor.models",
    "machine": "launch.doctor.machine",
    "ports": "launch.doctor.machine",
    "place": "launch.doctor.place",
    "server": "launch.doctor.server",
    "mistakes": "cli.doctor",
}
"""The module that has the function `look_at_NAME`; only that one is imported."""


def main(probe: str, *words: str) -> None:
    module = importlib.import_module(f"offbeat.{PROBES[probe]}")
    print(json.dumps(asdict(getattr(module, f"look_at_{probe}")(*words))))


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line: what we foresaw in its own words, anything else with its type."""
    told = " ".join(str(error).split())
    print(told if isinstance(error, OffbeatError) else f"{kind.__name__}: {told}", file=sys.stderr)


if __name__ == "__main__":
    sys.excepthook = _tell
    main(*sys.argv[1:])
