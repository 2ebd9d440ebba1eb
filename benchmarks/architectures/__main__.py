"""Compares trainer and embedded engine with transformers' own code, on every causal architecture in transformers.

Each architecture is made tiny and random (see `tiny`) and compared (see `compare`): it agrees, or it is refused in one
line. Architectures that could not be built are listed with their errors. Nothing is timed, so two models run at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from benchmarks import report
from benchmarks.architectures import page, tiny
from benchmarks.architectures.attempt import attempt
from benchmarks.architectures.compare import Result

QUICK = (
    "llama",
    "mistral",
    "gemma2",
    "gpt_oss",
    "phimoe",
    "mixtral",
    "deepseek_v3",
    "nemotron",
    "lfm2",
    "bloom",
    "roberta",
)
"""A window; a cap; sinks; a window that only the mask has; a router's noise; heads of unequal sizes; an attention that
is told nothing; a convolution; an attention that cannot be replaced; and one that is refused."""
MIN_ATTEMPTED, MAX_REFUSED_SHARE = 120, 0.30


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description="All architectures beside transformers' own code."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures, all by default")
    parser.add_argument("--quick", action="store_true", help=f"only {len(QUICK)} of them")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the table of models there (docs/models.md)")
    parser.add_argument("--raw", metavar="FILE", type=Path, help="write every result there, as JSON")
    options = parser.parse_args()
    if unknown := set(options.names) - set(tiny.names()):
        print(f"architectures: {', '.join(sorted(unknown))}: transformers has no such causal model", file=sys.stderr)
        return 2
    start_s = time.monotonic()
    results = attempt(options.names or (QUICK if options.quick else tiny.names()))
    if options.raw:
        lines = ",\n".join(json.dumps(asdict(result)) for result in results)
        options.raw.write_text(f'{{"transformers": "{transformers.__version__}", "results": [\n{lines}\n]}}\n')
    if options.page:
        options.page.write_text(page.written(results, transformers.__version__))
    is_part = options.quick or bool(options.names)
    show(results, is_part=is_part, quick=options.quick, seconds=round(time.monotonic() - start_s))
    return 0


def show(results: Sequence[Result], *, is_part: bool, **raw: Any) -> None:
    """Prints the table and the bars. `is_part`: whether only some architectures were chosen."""
    built = [result for result in results if result.error is None]
    refused = [result for result in built if "refused" in result.statuses]
    disagreeing = [result.name for result in built if "disagrees" in result.statuses]
    failing = [result.name for result in built if "fails" in result.statuses]
    share = len(refused) / len(built) if built else 1.0
    decides = None if is_part else True
    bars = {
        "architectures attempted": _bar(len(results), MIN_ATTEMPTED, decides and len(results) >= MIN_ATTEMPTED),
        "disagreements": _bar(len(disagreeing), 0, not disagreeing),
        "share refused of those built": _bar(share, MAX_REFUSED_SHARE, decides and share <= MAX_REFUSED_SHARE),
        "tracebacks": _bar(len(failing), 0, not failing),
    }
    rows = [
        (result.name, *(page.cell(verdict) for verdict in (result.trainer, result.engine)), result.error or "")
        for result in results
    ]
    report.show(
        "architectures",
        ("architecture", "trainer", "engine", "not built"),
        rows,
        bars,
        built=len(built),
        refused=[result.name for result in refused],
        disagreeing=disagreeing,
        failing=failing,
        transformers=transformers.__version__,
        **raw,
    )


def _bar(value: float, target: float, holds: bool | None) -> report.Bar:
    return report.Bar(round(value, 3), target, holds, (round(value, 3), round(value, 3)))


if __name__ == "__main__":
    sys.exit(main())
