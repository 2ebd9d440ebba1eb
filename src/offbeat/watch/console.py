"""What a person sees while a run goes on: a line a step, a progress bar, and at the end what came of it.

`rich` draws on a terminal, `plain` writes lines that are good in a log, `quiet` says nothing but alarms. All show the
same figures, all fit 80 columns, and a figure that a row lacks is left blank. Steps that follow one another faster than
a person reads share a line; evaluations, the first and the last step always get theirs.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

Row = Mapping[str, Any]
Clock = Callable[[], float]

STAGES = ("generate", "reward", "train", "publish")
RICH_LINE_EVERY_S = 1.0
PLAIN_LINE_EVERY_S = 5.0
"""Logs are read afterwards, often in a browser that would rather not hold a line for every step."""
COLUMNS = (("step", 9), ("reward", 7), ("held-out", 9), ("length", 7), ("gap", 8), ("tok/s", 7), ("smp/s", 7))
SPLIT = "g/r/t/p/o %"
LEGEND = "gap: engine vs trainer; g/r/t/p/o %: generate, reward, train, publish, other"


class Console(Protocol):
    """Told of steps in order; use it in a `with` statement, so that the terminal is left as it was found."""

    def step(self, row: Row) -> None: ...
    def note(self, text: str) -> None:
        """Something worth knowing."""
        ...

    def alarm(self, text: str) -> None:
        """Something that a person should act upon."""
        ...

    def finish(self, summary: Row, folder: str) -> None:
        """The run's end: what it achieved and what can be done with it."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def open_console(mode: str, num_steps: int, first_step: int = 0, file: TextIO | None = None) -> Console:
    """The console for `log.console`; `auto` draws on a terminal and writes plain lines elsewhere."""
    file = file or sys.stdout
    if mode == "auto":
        mode = "rich" if file.isatty() else "plain"
    if mode == "rich":
        from offbeat.watch.terminal import TerminalConsole

        return TerminalConsole(num_steps, first_step, file)
    return PlainConsole(num_steps, file, quiet=mode == "quiet")


class PlainConsole:
    """Lines for logs and pipes."""

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
            for name, text in closing_words(summary, folder):
                self._print(f"{name:<10} {text}")

    def close(self) -> None:
        pass  # every line was flushed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, text: str) -> None:
        """A line that a full disk has no room for is lost; the run's own files have the figures."""
        try:
            print(text, file=self.file, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            pass


class LineDue:
    """Says which steps get a line of their own."""

    def __init__(self, num_steps: int, every_s: float, clock: Clock):
        self.num_steps, self.every_s, self.clock = num_steps, every_s, clock
        self.last_s = -math.inf

    def __call__(self, row: Row) -> bool:
        if held_out(row) is not None and "reward" not in row:
            return True  # an evaluation; it takes no step's line
        always = row.get("step", 0) >= self.num_steps
        if not always and self.clock() - self.last_s < self.every_s:
            return False
        self.last_s = self.clock()
        return True


def header() -> str:
    return "".join(f"{name:>{width}}" for name, width in COLUMNS) + f"  {SPLIT}"


def line(row: Row, num_steps: int) -> str:
    """A step's figures below `header`."""
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
    """The mean held-out reward of a row that carries an evaluation, whatever its k."""
    return next((value for key, value in row.items() if key.startswith("eval_mean@")), row.get("eval_reward"))


def time_split(row: Row) -> str:
    """Each stage's share of the step's seconds, in percent, such as `62/1/30/5/2`."""
    seconds = row.get("seconds")
    spent = [row.get(f"time_{stage}_s", 0.0) for stage in STAGES]
    if not seconds or not any(spent):
        return ""
    total = max(seconds, sum(spent))  # stages that overlap may add up to more than the step
    return "/".join(str(round(100 * part / total)) for part in [*spent, total - sum(spent)])


def closing_words(summary: Row, folder: str) -> list[tuple[str, str]]:
    """The run's end in a few named lines; what the summary lacks is left out."""
    words = [("reward", _from_to(summary.get("reward_first"), summary.get("reward_last")))]
    words.append(("held-out", _from_to(summary.get("eval_first"), summary.get("eval_last"))))
    seconds, steps = summary.get("seconds"), summary.get("steps")
    if seconds is not None and steps is not None:
        words.append(("time", f"{_steps(steps)} in {duration(seconds)}"))
    speed = [("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")]
    words.append(("speed", ", ".join(f"{short(summary[key])} {unit}" for key, unit in speed if summary.get(key))))
    if failures := summary.get("failures"):
        told = ", ".join(f"{count} by {reason}" for reason, count in failures.items())
        words.append(("failed", f"{told}; left out of training, see {folder}/logs"))
    words.append(("run", folder))
    if summary.get("finished") is False:
        words.append(("next", f"offbeat train --resume {folder}"))
    elif steps:
        words.append(("next", f"offbeat export {folder} MODEL_DIR"))
        words.append(("or", f"offbeat train --resume {folder} --run.steps {2 * steps}"))
    return [(name, text) for name, text in words if text]


def duration(seconds: float) -> str:
    """`8.2 s`, `2 min 5 s` or `3 h 12 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def short(value: float | None) -> str:
    """A rate in three or four characters, such as `9.3`, `847`, `12.3k`."""
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


def _steps(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"
