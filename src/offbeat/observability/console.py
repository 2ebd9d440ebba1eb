"""The console: a line per step, what the run is doing within a step, and the results at the end.

`rich` draws on a terminal, `plain` writes lines for a log, `quiet` prints only alarms. Terminals wider than 80 columns
show more figures than a log; a missing figure is blank. If steps follow faster than a person reads, some get no line;
evaluations, the first step and the last step always get a line. `offbeat.observability.notebook` has the console of
notebooks.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TextIO

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
Clock = Callable[[], float]

RICH_LINE_EVERY_S = 1.0
PLAIN_LINE_EVERY_S = 5.0
"""Shortest times between two lines on a terminal and in a log. A log should not have a line for every short step."""
FIRST_SIGN_S, SIGN_EVERY_S = 10.0, 30.0
"""Seconds of silence after which a log gets a line about what the run is doing: `FIRST_SIGN_S` until the first step has
its line, `SIGN_EVERY_S` from then on."""
PLAIN_WIDTH = 80
FIRST_STEPS, LAST_STEPS = 3, 10
"""Numbers of steps over which a run's first and last reward are averaged. One step is too noisy; the first number is
smaller, because learning is fastest at first."""


class Column(NamedTuple):
    name: str
    width: int
    cell: Callable[[Row], str]


def columns(
    num_steps: int, width: int = PLAIN_WIDTH, *, has_workers: bool = False, has_episodes: bool = False
) -> list[Column]:
    """Returns the columns that fit into `width`. `has_workers`: whether the run may have several workers.
    `has_episodes`: whether its answers have turns."""
    found = [
        Column("step", 9, lambda row: f"{row['step']}/{num_steps}" if "step" in row else ""),
        Column("reward", 7, lambda row: _number(row.get("reward"), ".3f")),
        Column("held-out", 16, held_out_cell),
        Column("length", 7, lambda row: _number(row.get("length"), ".1f")),
        Column("cut", 5, lambda row: _number(row.get("cut_share"), ".0%")),
        Column("signal", 7, lambda row: _number(row.get("signal_share"), ".0%")),
        Column("staleness", 10, lambda row: _number(row.get("staleness"), ".1f")),
    ]
    if has_episodes:
        found[-2:] = [
            Column("turns", 6, lambda row: _number(row.get("turns"), ".1f")),
            Column("calls", 6, lambda row: _number(row.get("calls"), ".1f")),
            Column("tool s", 7, lambda row: _number(row.get("tool_s"), ".2f")),
        ]
    if has_workers:
        found.append(Column("workers", 8, lambda row: _number(row.get("workers"), "d")))
    found.append(Column("tok/s", 7, lambda row: short(row.get("tokens_per_second"))))
    further = [
        Column("s/step", 7, lambda row: _number(row.get("seconds"), ".1f")),
        Column("entropy", 8, lambda row: _number(row.get("entropy"), ".2f")),
        Column("grad norm", 10, lambda row: _number(row.get("grad_norm"), ".2f")),
        Column("waiting", 8, lambda row: _share_of_time(row, "time_wait_s")),
        Column("training", 9, lambda row: _share_of_time(row, "time_train_s")),
    ]
    room = width - sum(column.width for column in found)
    for column in further:
        if (room := room - column.width) < 0:
            break
        found.append(column)
    return found


def header(shown: Sequence[Column]) -> str:
    return "".join(f"{column.name:>{column.width}}" for column in shown)


def line(row: Row, shown: Sequence[Column]) -> str:
    """Returns a step's figures as a line that fits below `header`."""
    return "".join(f"{column.cell(row):>{column.width}}" for column in shown).rstrip()


def held_out(row: Row) -> float | None:
    """Returns the mean held-out reward of a row, `eval_mean@k` for any k; None if the row has no evaluation."""
    return next((value for key, value in row.items() if key.startswith("eval_mean@")), row.get("eval_reward"))


def held_out_cell(row: Row) -> str:
    """Returns the mean held-out reward of a row with the number of answers, such as `0.340 (200)`. With 4 answers to
    each prompt it is `0.340 (200x4)`; if 50 of 800 answers failed, `0.340 (750/800)`."""
    mean = _number(held_out(row), ".3f")
    if not mean or "eval_prompts" not in row:
        return mean
    return f"{mean} ({num_held_out(row)})"


def num_held_out(figures: Row) -> str:
    prompts, scored, failed = figures["eval_prompts"], figures.get("eval_samples"), figures.get("eval_failed", 0)
    if failed and scored is not None:
        return f"{scored}/{scored + failed}"
    return f"{prompts}x{scored // prompts}" if scored and prompts and scored > prompts else f"{prompts}"


def _share_of_time(row: Row, name: str) -> str:
    spent, seconds = row.get(name), row.get("seconds")
    return _number(min(spent / seconds, 1.0), ".0%") if spent is not None and seconds else ""


class Console(Protocol):
    """Shows steps in order. Must be used in a `with` statement, which restores the terminal at the end."""

    def step(self, row: Row) -> None: ...
    def doing(self, text: str) -> None:
        """Shows what the run is doing within a step. The caller calls it about once a second."""
        ...

    def note(self, text: str) -> None:
        """Shows a text that is worth knowing."""
        ...

    def alarm(self, text: str) -> None:
        """Shows a text that a person should act upon."""
        ...

    def finish(self, summary: Row, folder: str, *, from_python: bool = False, command: str = "train") -> None:
        """Shows the results and what to do next, see `closing_lines`."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def open_console(
    mode: str,
    num_steps: int,
    first_step: int = 0,
    file: TextIO | None = None,
    *,
    has_workers: bool = False,
    has_episodes: bool = False,
) -> Console:
    """Opens the console for `mode`, a value of `log.console`. `auto` means a table in a notebook, `rich` on a terminal,
    else `plain`. `first_step` is the number of steps trained before, as on a resume. `has_workers` says whether the run
    may have several workers; then their number is shown."""
    if mode == "auto" and file is None and in_notebook():
        from offbeat.observability.notebook import NotebookConsole

        return NotebookConsole(num_steps, has_workers=has_workers, has_episodes=has_episodes)
    file = file or sys.stdout
    if mode == "auto":
        mode = "rich" if file.isatty() else "plain"
    if mode == "rich":
        return TerminalConsole(num_steps, first_step, file, has_workers=has_workers, has_episodes=has_episodes)
    return PlainConsole(
        num_steps, file, first_step, quiet=mode == "quiet", has_workers=has_workers, has_episodes=has_episodes
    )


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Imports nothing: a kernel has already imported IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class PlainConsole(Console):
    """Console that writes plain lines, for logs and pipes; with `quiet`, only alarms."""

    def __init__(
        self,
        num_steps: int,
        file: TextIO,
        first_step: int = 0,
        *,
        quiet: bool = False,
        has_workers: bool = False,
        has_episodes: bool = False,
        clock: Clock = time.monotonic,
    ):
        self.file, self.quiet, self.clock = file, quiet, clock
        self.due = LineDue(num_steps, PLAIN_LINE_EVERY_S, clock)
        self.columns = columns(num_steps, has_workers=has_workers, has_episodes=has_episodes)
        self.num_steps, self.last_step = num_steps, first_step
        self.has_header = False
        self.start_s = self.last_s = clock()

    def step(self, row: Row) -> None:
        self.last_step = row.get("step", 0)
        if self.quiet or not self.due(row):
            return
        if not self.has_header:
            self._print(header(self.columns))
            self.has_header = True
        self._print(line(row, self.columns))

    def doing(self, text: str) -> None:
        silent_s = self.clock() - self.last_s
        if not self.quiet and silent_s >= (SIGN_EVERY_S if self.has_header else FIRST_SIGN_S):
            self._print(f"{f'{self.last_step}/{self.num_steps}':>9}  {text}, {duration(self.clock() - self.start_s)}")

    def note(self, text: str) -> None:
        if not self.quiet:
            self._print(text)

    def alarm(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def finish(self, summary: Row, folder: str, *, from_python: bool = False, command: str = "train") -> None:
        if not self.quiet:
            for name, text in closing_lines(summary, folder, from_python=from_python, command=command):
                self._print(f"{name:<10} {text}")

    def _print(self, text: str) -> None:
        """Prints a line. If it cannot be written, as on a full disk, it is dropped; its figures are in the run's
        files."""
        self.last_s = self.clock()
        try:
            print(text, file=self.file, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            pass


class LineDue:
    """Decides which steps the console shows: at most one step per `every_s` seconds, and always evaluations and the
    last step."""

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


def closing_lines(
    summary: Row, folder: str, *, from_python: bool = False, command: str = "train"
) -> list[tuple[str, str]]:
    """Returns a run's results as pairs of a name and a text; figures that the summary lacks are left out. The last
    pairs say how to go on: with a command or, if the run was started `from_python`, with a Python call, because a
    command lacks the functions that the program passed. `command` is the command that resumes the run; with `serve`,
    the run's trainer has to join again."""
    seconds, steps = summary.get("seconds"), summary.get("steps")
    first, last = ends(steps or 0)
    reward = _from_to(summary.get("reward_first"), summary.get("reward_last"))
    failures = summary.get("failures")
    only = ", without answers that failed" if failures else ""
    words = [("reward", f"{reward}  (first {_steps(first)} → last {_steps(last)}{only})" if reward else "")]
    held = _from_to(summary.get("eval_first"), summary.get("eval_last"))
    if summary.get("eval_step") == 0:
        held = _number(summary.get("eval_last"), ".3f")
    if held and summary.get("eval_prompts"):
        held += f"  ({_answers(summary)}{_when_judged(summary)})"
    words.append(("held-out", held))
    if seconds is not None and steps is not None:
        in_steps, of_steps = summary.get("seconds_in_steps"), f"{steps} {'step' if steps == 1 else 'steps'}"
        parts = f"{of_steps} in {duration(seconds)}"
        if in_steps is not None:
            outside = duration(seconds - in_steps)
            parts = f"{duration(seconds)}  ({duration(in_steps)} in {of_steps}, {outside} outside them)"
        words.append(("time", parts))
    speed = [("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")]
    words.append(("speed", ", ".join(f"{short(summary[key])} {unit}" for key, unit in speed if summary.get(key))))
    if failures:
        counts = ", ".join(f"{count} by {reason}" for reason, count in failures.items())
        words.append(("failed", f"{counts}; left out of training, see {folder}/logs"))
    words.append(("run", folder))
    resume = f"{program()} {command} --resume {folder}"
    if summary.get("finished") is False:
        words.append(("next", "run.resume()" if from_python else resume))
    elif steps and from_python:
        words += [("next", 'run.export("MODEL_DIR")'), ("or", f"run.resume(steps={2 * steps})")]
    elif steps:
        words.append(("next", f"{program()} export {folder} MODEL_DIR"))
        words.append(("or", f"{resume} --run.steps {2 * steps}"))
    if command == "serve":
        words.append(("then", "start the trainer again as before (the same --dir); it needs no token"))
    return [(name, text) for name, text in words if text]


def program() -> str:
    """Returns how to call Offbeat in a shell: `offbeat`, or its path if the shell would not find it, as after
    `make demo`."""
    own = Path(sys.argv[0])
    return os.path.relpath(own) if own.name == "offbeat" and shutil.which("offbeat") is None else "offbeat"


def ends(num_steps: int) -> tuple[int, int]:
    """Returns the numbers of steps over which the first and the last reward of a run are averaged."""
    half = max(1, num_steps // 2)
    return min(FIRST_STEPS, half), min(LAST_STEPS, half)


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _answers(summary: Row) -> str:
    scored, failed, prompts = (summary.get(f"eval_{name}") or 0 for name in ("samples", "failed", "prompts"))
    if failed:
        return f"{scored} of {scored + failed} answers; {failed} failed"
    each = f", {scored // prompts} answers each" if scored > prompts else ""
    return f"{prompts} problems{each}"


def _when_judged(summary: Row) -> str:
    """Returns when the last evaluation was; "" if it was after the last step, or if `summary` has no `eval_step`."""
    step = summary.get("eval_step")
    if step == 0:
        return ", before training"
    return "" if step in (None, summary.get("steps")) else f", after step {step}"


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
    """Console on a terminal, drawn by rich: lines scroll above a progress bar with what the run is doing."""

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        file: TextIO,
        *,
        has_workers: bool = False,
        has_episodes: bool = False,
        clock: Clock = time.monotonic,
    ):
        self.num_steps = num_steps
        self.rich = RichConsole(file=file, highlight=False)
        self.columns = columns(num_steps, self.rich.width, has_workers=has_workers, has_episodes=has_episodes)
        self.due = LineDue(num_steps, RICH_LINE_EVERY_S, clock)
        self.num_lines = 0
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[doing]}", style="bold"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.rich,
            refresh_per_second=REFRESH_PER_S,
            expand=True,
            transient=True,
        )
        self.bar = self.progress.add_task("train", total=num_steps, completed=first_step, doing="")

    def step(self, row: Row) -> None:
        # What it was doing is over. Refreshed at once, because the line is printed above the bar as last drawn.
        step = {"completed": row.get("step", 0)} if row.get("reward") is not None else {}
        self.progress.update(self.bar, doing="", refresh=True, **step)
        if not self.due(row):
            return
        if self.num_lines % LINES_PER_HEADER == 0:
            self.rich.print(Text(header(self.columns), style="dim bold"), soft_wrap=True)
        style = "cyan" if held_out(row) is not None else ""
        self.rich.print(Text(line(row, self.columns), style=style), soft_wrap=True)
        self.num_lines += 1

    def doing(self, text: str) -> None:
        self.progress.update(self.bar, doing=text)

    def note(self, text: str) -> None:
        self.rich.print(Text(text), soft_wrap=True)

    def alarm(self, text: str) -> None:
        self.rich.print(Text(f"warning: {text}", style="bold yellow"), soft_wrap=True)

    def finish(self, summary: Row, folder: str, *, from_python: bool = False, command: str = "train") -> None:
        self.progress.stop()
        table = Table.grid(padding=(0, 2))
        for name, text in closing_lines(summary, folder, from_python=from_python, command=command):
            style = "bold green" if name in ("reward", "held-out") else ""
            table.add_row(Text(name, style="dim"), Text(text, style=style, overflow="fold"))
        title, color = ("stopped", "yellow") if summary.get("finished") is False else ("done", "green")
        self.rich.print(Panel(table, title=title, title_align="left", border_style=color, expand=False))

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
