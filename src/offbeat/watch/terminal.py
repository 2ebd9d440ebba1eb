"""The console on a terminal: lines that scroll above a bar that stays, drawn by rich.

The bar is redrawn four times a second at most and whatever else prints goes above it, so nothing flickers or tears.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from offbeat.watch.console import (
    LEGEND,
    RICH_LINE_EVERY_S,
    Clock,
    LineDue,
    Row,
    closing_words,
    header,
    held_out,
    line,
)

REFRESH_PER_S = 4
LINES_PER_HEADER = 20
"""So that a screen always shows what its columns mean."""


class TerminalConsole:
    """A bar with the latest reward, below a line a step."""

    def __init__(self, num_steps: int, first_step: int, file: TextIO, *, clock: Clock = time.monotonic):
        self.num_steps = num_steps
        self.rich = RichConsole(file=file, highlight=False)
        self.due = LineDue(num_steps, RICH_LINE_EVERY_S, clock)
        self.num_lines = 0
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[reward]}", style="bold"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.rich,
            refresh_per_second=REFRESH_PER_S,
            expand=True,
            transient=True,
        )
        self.bar = self.progress.add_task("train", total=num_steps, completed=first_step, reward="")

    def step(self, row: Row) -> None:
        reward = row.get("reward")
        if reward is not None:
            self.progress.update(self.bar, completed=row.get("step", 0), reward=f"reward {reward:.3f}")
        if not self.due(row):
            return
        if self.num_lines == 0:
            self.rich.print(Text(LEGEND, style="dim"), soft_wrap=True)
        if self.num_lines % LINES_PER_HEADER == 0:
            self.rich.print(Text(header(), style="dim bold"), soft_wrap=True)
        style = "cyan" if held_out(row) is not None else ""
        self.rich.print(Text(line(row, self.num_steps), style=style), soft_wrap=True)
        self.num_lines += 1

    def note(self, text: str) -> None:
        self.rich.print(Text(text), soft_wrap=True)

    def alarm(self, text: str) -> None:
        self.rich.print(Text(f"warning: {text}", style="bold yellow"), soft_wrap=True)

    def finish(self, summary: Row, folder: str) -> None:
        self.progress.stop()
        table = Table.grid(padding=(0, 2))
        for name, text in closing_words(summary, folder):
            style = "bold green" if name in ("reward", "held-out") else ""
            table.add_row(Text(name, style="dim"), Text(text, style=style, overflow="fold"))
        title, color = ("stopped", "yellow") if summary.get("finished") is False else ("done", "green")
        self.rich.print(Panel(table, title=title, title_align="left", border_style=color, expand=False))

    def close(self) -> None:
        self.progress.stop()

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
