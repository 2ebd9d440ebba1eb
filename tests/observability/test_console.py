import io
from pathlib import Path

import pytest

from offbeat.observability.console import (
    PlainConsole,
    TerminalConsole,
    closing_lines,
    duration,
    header,
    line,
    open_console,
    short,
    time_split,
)

ROW = {
    "step": 3,
    "reward": 0.4123,
    "length": 6.1,
    "logprob_gap": 1.2e-6,
    "tokens_per_second": 12345.0,
    "samples_per_second": 847.2,
    "seconds": 0.3,
    "time_generate_s": 0.18,
    "time_reward_s": 0.003,
    "time_train_s": 0.09,
    "time_publish_s": 0.01,
}
SUMMARY = {
    "steps": 60,
    "seconds": 131.2,
    "reward_first": 0.41,
    "reward_last": 0.89,
    "eval_first": 0.39,
    "eval_last": 0.87,
    "samples_per_second": 847.2,
    "tokens_per_second": 12345.0,
}


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_everything_in_80_columns():
    text = line({**ROW, "step": 12345, "eval_mean@4": 0.5}, 99999)
    assert text.split() == ["12345/99999", "0.412", "0.500", "6.1", "1.2e-06", "12.3k", "847", "60/1/30/3/6"]
    assert len(text) <= 80
    assert len(header()) <= 80


@pytest.mark.parametrize("row", [{}, {"step": 1}, {"step": 1, "reward": None}, {"step": 1, "reward": float("nan")}])
def test_a_row_may_lack_anything(row):
    assert "nan" not in line(row, 10)


def test_stages_that_overlap_never_exceed_the_whole():
    assert time_split({"seconds": 1.0, "time_generate_s": 1.0, "time_train_s": 1.0}) == "50/0/50/0/0"


def test_fast_steps_share_a_line_but_evaluations_and_the_last_step_get_theirs():
    file, clock = io.StringIO(), FakeClock()
    console = PlainConsole(20, file, clock=clock)
    for step in range(1, 21):
        clock.now_s += 1
        console.step({"step": step, "reward": 0.5})
        if step == 3:
            console.step({"step": step, "eval_mean@1": 0.5})
    shown = [text.split("/")[0].strip() for text in file.getvalue().splitlines()[2:]]
    assert shown == ["1", "3", "6", "11", "16", "20"]


def test_a_quiet_console_speaks_only_of_alarms(capsys):
    with open_console("quiet", 10) as console:
        console.step(ROW)
        console.note("hello")
        console.finish(SUMMARY, "runs/x")
        console.alarm("engine and trainer disagree")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "warning: engine and trainer disagree\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_console_on_a_full_disk_loses_lines_and_ends_nothing():
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    with PlainConsole(3, full) as console:
        console.note("serving")
        console.step({"step": 1, "reward": 0.5})
        console.finish({"steps": 1}, "runs/a")
    full.detach().close()


def test_auto_draws_on_a_terminal_and_writes_lines_elsewhere():
    assert isinstance(open_console("auto", 10, file=Terminal()), TerminalConsole)
    assert isinstance(open_console("auto", 10, file=io.StringIO()), PlainConsole)


def test_a_terminal_gets_lines_a_bar_and_a_panel(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with open_console("rich", 10, file=file) as console:
        console.step(ROW)
        console.note("resumed [at] step 3")
        console.alarm("look [here]")
        console.finish(SUMMARY, "runs/x")
    text = file.getvalue()
    for told in ("0.412", "resumed [at] step 3", "look [here]", "0.410 → 0.890", "offbeat export runs/x", "reward"):
        assert told in text


def test_the_end_says_what_came_of_it_and_what_to_do_next():
    words = dict(closing_lines(SUMMARY, "runs/x"))
    assert words["reward"] == "0.410 → 0.890"
    assert words["time"] == "60 steps in 2 min 11 s"
    assert words["or"] == "offbeat train --resume runs/x --run.steps 120"
    stopped = dict(closing_lines({"finished": False, "steps": 3, "reward_first": None}, "runs/x"))
    assert stopped == {"run": "runs/x", "next": "offbeat train --resume runs/x"}


def test_numbers_are_short():
    numbers = {
        None: "",
        9.26: "9.3",
        99.96: "100.0",
        847.2: "847",
        1e3: "1.0k",
        12345.0: "12.3k",
        1e6: "1.0M",
        2.5e6: "2.5M",
    }
    assert {number: short(number) for number in numbers} == numbers
    assert [duration(x) for x in (8.21, 125, 11_520)] == ["8.2 s", "2 min 5 s", "3 h 12 min"]
