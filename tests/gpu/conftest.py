"""Tests that need a GPU (`make test-gpu`): elsewhere they are left out, but for those of their own bookkeeping."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from benchmarks.report import machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU here; make test-gpu runs this where there is one"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes what was run into the file that OFFBEAT_GPU_REPORT names."""
    if file := os.environ.get("OFFBEAT_GPU_REPORT"):
        Path(file).write_text(report(terminalreporter.stats))


def report(stats: dict[str, list]) -> str:
    where, counts = (
        machine(),
        {kind: len(stats[kind]) for kind in ("passed", "failed", "error", "skipped") if stats.get(kind)},
    )
    seconds = {test.nodeid: test.duration for test in stats.get("passed", []) + stats.get("failed", [])}
    lines = [
        "# What was run on a GPU",
        "",
        f"`make test-gpu` on {datetime.now(UTC):%Y-%m-%d}, commit {os.environ.get('OFFBEAT_COMMIT', where['commit'])}, "
        f"{where['accelerator']}, {where['cores']} CPU cores, Python {where['python']}, torch {torch.__version__}: "
        + ", ".join(f"{number} {kind}" for kind, number in counts.items())
        + ".",
        "",
        "| test | seconds | |",
        "|---|---|---|",
    ]
    for kind in ("failed", "error", "passed"):
        tests = [test for test in stats.get(kind, []) if "tests/gpu/" in test.nodeid or kind != "passed"]
        lines += [f"| `{test.nodeid}` | {seconds.get(test.nodeid, 0.0):.0f} | {kind} |" for test in tests]
    return "\n".join([*lines, "", "Contracts and codecs, which take part as well, are not listed one by one.", ""])
