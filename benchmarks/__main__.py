"""Runs the benchmarks in turn and prints their bars in one table: `python -m benchmarks [NAME ...] [--full]`.

Each benchmark is run as `python -m benchmarks.NAME [--quick]`. Its last line is JSON with `bars`, a map from a name to
`{value, target, holds}`. The exit status is 1 only if a benchmark fails to run, not if it misses a target.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import REPOSITORY

QUICK_LIMIT_S = 180.0
"""Time limit of a quick form, which should end within a minute; a busy machine may take three times as long."""
FULL_LIMIT_S = 4 * 3600.0
HOLDS = {True: "yes", False: "NO", None: "-"}


def main() -> int:
    names = available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Runs benchmarks and prints one table.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(names) or 'there are none'}"
    )
    parser.add_argument("--full", action="store_true", help="the whole benchmarks instead of their quick forms")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        print(f"benchmarks: unknown {', '.join(sorted(unknown))}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    rows: list[tuple[str, ...]] = [("benchmark", "bar", "value", "target", "holds")]
    broken = []
    for name in arguments.names or names:
        start_s = time.monotonic()
        result = run(name, quick=not arguments.full)
        print(
            f"{name}: {'failed' if result is None else 'done'} in {time.monotonic() - start_s:.0f} s", file=sys.stderr
        )
        if result is None:
            broken.append(name)
            rows.append((name, "", "", "", "failed"))
        for bar, told in (result or {}).get("bars", {}).items():
            rows.append((name, bar, shown(told.get("value")), shown(told.get("target")), HOLDS[told.get("holds")]))
    print(table(rows))
    return 1 if broken else 0


def available() -> list[str]:
    """Names of the benchmarks in this folder."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/__main__.py"))


def run(name: str, *, quick: bool) -> dict[str, Any] | None:
    """Runs a benchmark and returns the JSON of its last line. If it fails, prints its output and returns None."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    limit_s = QUICK_LIMIT_S if quick else FULL_LIMIT_S
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_s, check=True)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {limit_s:.0f} s", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"{name}: exit status {error.returncode}\n{error.stdout}{error.stderr}", file=sys.stderr)
    except (json.JSONDecodeError, IndexError):
        print(f"{name}: its last line is not JSON\n{done.stdout}", file=sys.stderr)
    return None


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
