"""The console: a line per step, a progress bar, and the results at the end.

`rich` draws on a terminal, `plain` writes lines for a log, `quiet` prints only alarms. The first two show the same
figures in 80 columns; a missing figure is blank. If steps follow faster than a person reads, some get no line;
evaluations, the first step and the last step always do.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TextIO

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
Clock = Callable[[], float]

STAGES = ("generate", "reward", "train", "publish")
RICH_LINE_EVERY_S = 1.0
PLAIN_LINE_EVERY_S = 5.0
"""Shortest time between two lines; longer than on a terminal, because a log should not have a line for every step."""
COLUMNS = (("step", 9), ("reward", 7), ("held-out", 9), ("length", 7), ("gap", 8), ("tok/s", 7), ("smp/s", 7))
SPLIT = "g/r/t/p/o %"
LEGEND = "gap: engine vs trainer; g/r/t/p/o %: generate, reward, train, publish, other"


class Console(Protocol):
    """Shows steps in order. Must be used in a `with` statement, which restores the terminal at the end."""

    def step(self, row: Row) -> None: ...
    def note(self, text: str) -> None:
        """Shows a text that is worth knowing."""
        ...

    def alarm(self, text: str) -> None:
        """Shows a text that a person should act upon."""
        ...

    def finish(self, summary: Row, folder: str) -> None:
        """Shows the results and possible next commands."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def open_console(mode: str, num_steps: int, first_step: int = 0, file: TextIO | None = None) -> Console:
    """Opens the console for `mode`, a value of `log.console`. `auto` means `rich` on a terminal, else `plain`."""
    file = file or sys.stdout
    if mode == "auto":
        mode = "rich" if file.isatty() else "plain"
    if mode == "rich":
        return TerminalConsole(num_steps, first_step, file)
    return PlainConsole(num_steps, file, quiet=mode == "quiet")


class PlainConsole(Console):
    """Console that writes plain lines, for logs and pipes; with `quiet`, only alarms."""

    def __init__(self, num_steps: int, file: TextIO, *, quiet: bool = False, clock: Clock = time.monotonic):
        self.file, self.quiet = file, quiet
        self.due = LineDue(num_steps, PLAIN_LINE_EVERY_S, clock)
        self.num_steps = num_steps
        self.has_header = False

    def step(self, row: Row) -> None:
        if self.quiet or not self.due(row):
            return
        if not self.has_header:
            self._print(LEGEND)
            self._print(header())
            self.has_header = True
        self._print(line(row, self.num_steps))

    def note(self, text: str) -> None:
        if not self.quiet:
            self._print(text)

    def alarm(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, summary: Row, folder: str) -> None:
        if not self.quiet:
            for name, text in closing_lines(summary, folder):
                self._print(f"{name:<10} {text}")

    def _print(self, text: str) -> None:
        """Prints a line. A line that cannot be written, as on a full disk, is lost; its figures are in the run's
        files."""
        try:
            print(text, file=self.file, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            pass


class LineDue:
    """Decides which steps the console shows: at most one per `every_s` seconds, besides evaluations and the last
    step."""

    def __init__(self, num_steps: int, every_s: float, clock: Clock):
        self.num_steps, self.every_s, self.clock = num_steps, every_s, clock
        self.last_s = -math.inf

    def __call__(self, row: Row) -> bool:
        if held_out(row) is not None and "reward" not in row:
            return True  # an evaluation does not delay the next step's line
        always = row.get("step", 0) >= self.num_steps
        if not always and self.clock() - self.last_s < self.every_s:
            return False
        self.last_s = self.clock()
        return True


def header() -> str:
    return "".join(f"{name:>{width}}" for name, width in COLUMNS) + f"  {SPLIT}"


def line(row: Row, num_steps: int) -> str:
    """Returns a step's figures as a line that fits below `header`."""
    cells = [
        f"{row['step']}/{num_steps}" if "step" in row else "",
        _number(row.get("reward"), ".3f"),
        _number(held_out(row), ".3f"),
        _number(row.get("length"), ".1f"),
        _number(row.get("logprob_gap"), ".1e"),
        short(row.get("tokens_per_second")),
        short(row.get("samples_per_second")),
    ]
    text = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return f"{text}  {time_split(row)}".rstrip()


def held_out(row: Row) -> float | None:
    """Returns the mean held-out reward of a row, `eval_mean@k` for any k; None if the row has no evaluation."""
    return next((value for key, value in row.items() if key.startswith("eval_mean@")), row.get("eval_reward"))


def time_split(row: Row) -> str:
    """Returns the percentages of a step's time spent in each of `STAGES`, then in the rest, such as `62/1/30/5/2`."""
    seconds = row.get("seconds")
    spent = [row.get(f"time_{stage}_s", 0.0) for stage in STAGES]
    if not seconds or not any(spent):
        return ""
    total = max(seconds, sum(spent))  # stages that overlap may add up to more than the step
    return "/".join(str(round(100 * part / total)) for part in [*spent, total - sum(spent)])


def closing_lines(summary: Row, folder: str) -> list[tuple[str, str]]:
    """Returns a run's results as pairs of a name and a text; figures that the summary lacks are left out."""
    words = [("reward", _from_to(summary.get("reward_first"), summary.get("reward_last")))]
    words.append(("held-out", _from_to(summary.get("eval_first"), summary.get("eval_last"))))
    seconds, steps = summary.get("seconds"), summary.get("steps")
    if seconds is not None and steps is not None:
        words.append(("time", f"{steps} {'step' if steps == 1 else 'steps'} in {duration(seconds)}"))
    speed = [("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")]
    words.append(("speed", ", ".join(f"{short(summary[key])} {unit}" for key, unit in speed if summary.get(key))))
    if failures := summary.get("failures"):
        counts = ", ".join(f"{count} by {reason}" for reason, count in failures.items())
        words.append(("failed", f"{counts}; left out of training, see {folder}/logs"))
    words.append(("run", folder))
    if summary.get("finished") is False:
        words.append(("next", f"offbeat train --resume {folder}"))
    elif steps:
        words.append(("next", f"offbeat export {folder} MODEL_DIR"))
        words.append(("or", f"offbeat train --resume {folder} --run.steps {2 * steps}"))
    return [(name, text) for name, text in words if text]


def duration(seconds: float) -> str:
    """Returns a duration as text, such as `8.2 s`, `2 min 5 s` or `3 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def short(value: float | None) -> str:
    """Returns a rate in a few characters, such as `9.3`, `847` or `12.3k`."""
    if value is None or not math.isfinite(value):
        return ""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None or not math.isfinite(value) else format(value, form)


def _from_to(first: float | None, last: float | None) -> str:
    return f"{first:.3f} → {last:.3f}" if first is not None and last is not None else ""


REFRESH_PER_S = 4
LINES_PER_HEADER = 20
"""Number of lines after which the header is repeated, so that the names of the columns stay on the screen."""


class TerminalConsole(Console):
    """Console on a terminal, drawn by rich: lines scroll above a progress bar with the latest reward."""

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
        for name, text in closing_lines(summary, folder):
            style = "bold green" if name in ("reward", "held-out") else ""
            table.add_row(Text(name, style="dim"), Text(text, style=style, overflow="fold"))
        title, color = ("stopped", "yellow") if summary.get("finished") is False else ("done", "green")
        self.rich.print(Panel(table, title=title, title_align="left", border_style=color, expand=False))

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
