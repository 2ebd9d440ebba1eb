import io
from pathlib import Path

import pytest

from offbeat.observability import console
from offbeat.observability.console import (
    PlainConsole,
    TerminalConsole,
    closing_lines,
    columns,
    duration,
    header,
    line,
    open_console,
    short,
)

ROW = {
    "step": 3,
    "reward": 0.4123,
    "length": 6.1,
    "cut_share": 0.126,
    "signal_share": 0.97,
    "staleness": 1.24,
    "workers": 3,
    "tokens_per_second": 12345.0,
    "seconds": 0.3,
    "entropy": 0.55,
    "grad_norm": 1.23,
    "time_wait_s": 0.18,
    "time_train_s": 0.4,
}
EVALUATION = {"step": 3, "eval_mean@4": 0.5, "eval_prompts": 15, "eval_samples": 60, "eval_failed": 0}
SUMMARY = {
    "steps": 60,
    "seconds": 131.2,
    "reward_first": 0.41,
    "reward_last": 0.89,
    "eval_first": 0.39,
    "eval_last": 0.87,
    "eval_prompts": 15,
    "eval_samples": 60,
    "eval_failed": 0,
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
    shown = columns(99999, has_workers=True)
    text = line({**ROW, **EVALUATION, "step": 12345}, shown)
    figures = ["12345/99999", "0.412", "0.500", "(15x4)", "6.1", "13%", "97%", "1.2", "3", "12.3k"]
    assert text.split() == figures
    assert len(text) <= len(header(shown)) + 2 <= 80


def test_a_wider_terminal_shows_more():
    names = [column.name for column in columns(10, width=120)]
    assert names[-5:] == ["s/step", "entropy", "grad norm", "waiting", "training"]
    assert line(ROW, columns(10, width=120)).split()[-5:] == ["0.3", "0.55", "1.23", "60%", "100%"]
    assert "workers" not in names
    assert len(header(columns(10, width=100, has_workers=True))) <= 100


def test_a_held_out_reward_says_of_how_many_answers_it_is_the_mean():
    cells = next(column for column in columns(10) if column.name == "held-out").cell
    assert cells({**EVALUATION, "eval_samples": 15}) == "0.500 (15)"
    assert cells(EVALUATION) == "0.500 (15x4)"
    assert cells({**EVALUATION, "eval_samples": 23, "eval_failed": 37}) == "0.500 (23/60)"
    assert cells({"eval_mean@1": 0.5}) == "0.500"  # of an older run


@pytest.mark.parametrize("row", [{}, {"step": 1}, {"step": 1, "reward": None}, {"step": 1, "reward": float("nan")}])
def test_a_row_may_lack_anything(row):
    assert "nan" not in line(row, columns(10, width=200, has_workers=True))


def test_a_log_gets_a_sign_of_life_when_no_line_came_for_long():
    file, clock = io.StringIO(), FakeClock()
    console = PlainConsole(20, file, clock=clock)
    for now_s in range(1, 96):
        clock.now_s = float(now_s)
        console.doing(f"answers {now_s}/99")
        if now_s == 25:
            console.step({"step": 1, "reward": 0.5})
    signs = [text.strip() for text in file.getvalue().splitlines() if "answers" in text]
    assert signs == [
        *("0/20  answers 10/99, 10.0 s", "0/20  answers 20/99, 20.0 s"),
        *("1/20  answers 55/99, 55.0 s", "1/20  answers 85/99, 1 min 25 s"),
    ]


def test_a_resumed_run_shows_the_step_that_it_goes_on_from_while_it_waits(monkeypatch):
    monkeypatch.setattr(console, "FIRST_SIGN_S", 0.0)
    file = io.StringIO()
    open_console("plain", 60, 28, file).doing("waiting for the trainer's first weights")
    assert file.getvalue().startswith("    28/60  waiting for the trainer")


def test_fast_steps_share_a_line_but_evaluations_and_the_last_step_get_theirs():
    file, clock = io.StringIO(), FakeClock()
    console = PlainConsole(20, file, clock=clock)
    for step in range(1, 21):
        clock.now_s += 1
        console.step({"step": step, "reward": 0.5})
        if step == 3:
            console.step({"step": step, "eval_mean@1": 0.5})
    shown = [text.split("/")[0].strip() for text in file.getvalue().splitlines()[1:]]
    assert shown == ["1", "3", "6", "11", "16", "20"]


def test_a_quiet_console_speaks_only_of_alarms(capsys):
    with open_console("quiet", 10) as console:
        console.step(ROW)
        console.doing("answers 3/8")
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
        console.doing("answers 37/64")
        console.note("resumed [at] step 3")
        console.alarm("look [here]")
        console.finish(SUMMARY, "runs/x")
    text = file.getvalue()
    for told in (
        "0.412",
        "answers 37/64",
        "resumed [at] step 3",
        "look [here]",
        "0.410 → 0.890",
        "offbeat export runs/x",
        "reward",
    ):
        assert told in text


def test_the_bar_is_at_the_step_of_the_line_above_it_and_forgets_what_is_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with open_console("rich", 10, file=file) as console:
        console.doing("answers 136/256")
        console.step(ROW)
        assert "step 3/10" in file.getvalue()
        assert "answers 136/256" not in file.getvalue().rpartition("step 3/10")[2]
        console.doing("held-out 0/15")
        before = len(file.getvalue())
        console.step(EVALUATION)
        assert "held-out 0/15" not in file.getvalue()[before:].rpartition("0.500")[2]


def test_the_end_says_what_came_of_it_and_what_to_do_next():
    words = dict(closing_lines(SUMMARY, "runs/x"))
    assert words["reward"] == "0.410 → 0.890  (first 3 steps → last 10 steps)"
    assert words["held-out"] == "0.390 → 0.870  (15 problems, 4 answers each)"
    failed = dict(closing_lines({**SUMMARY, "eval_samples": 23, "eval_failed": 37}, "runs/x"))
    assert failed["held-out"] == "0.390 → 0.870  (23 of 60 answers; 37 failed)"
    assert words["time"] == "60 steps in 2 min 11 s", "of an older run"
    words = dict(closing_lines({**SUMMARY, "seconds_in_steps": 71.1, "failures": {"raised": 3}}, "runs/x"))
    assert words["time"] == "2 min 11 s  (1 min 11 s in 60 steps, 1 min 0 s outside them)"
    assert words["reward"] == "0.410 → 0.890  (first 3 steps → last 10 steps, without answers that failed)"
    words = dict(closing_lines(SUMMARY, "runs/x"))
    assert words["or"] == "offbeat train --resume runs/x --run.steps 120"
    stopped = dict(closing_lines({"finished": False, "steps": 3, "reward_first": None}, "runs/x"))
    assert stopped == {"run": "runs/x", "next": "offbeat train --resume runs/x"}


def test_the_end_of_a_stopped_run_says_when_its_last_evaluation_was():
    only = {**SUMMARY, "steps": 7, "eval_first": 0.5, "eval_last": 0.5, "eval_step": 0, "eval_samples": 15}
    assert dict(closing_lines(only, "runs/x"))["held-out"] == "0.500  (15 problems, before training)"
    several = dict(closing_lines({**SUMMARY, "eval_step": 40}, "runs/x"))
    assert several["held-out"] == "0.390 → 0.870  (15 problems, 4 answers each, after step 40)"
    at_end = dict(closing_lines({**SUMMARY, "eval_step": 60}, "runs/x"))
    assert at_end["held-out"] == "0.390 → 0.870  (15 problems, 4 answers each)"


def test_the_end_of_a_run_that_its_trainer_joined_names_the_commands_of_both():
    trainer = "start the trainer again as before (the same --dir); it needs no token"
    words = dict(closing_lines(SUMMARY, "runs/x", command="serve"))
    assert (words["or"], words["then"]) == ("offbeat serve --resume runs/x --run.steps 120", trainer)
    stopped = dict(closing_lines({"finished": False, "steps": 3}, "runs/x", command="serve"))
    assert (stopped["next"], stopped["then"]) == ("offbeat serve --resume runs/x", trainer)


def test_the_end_of_a_run_from_python_says_what_to_call_next():
    words = dict(closing_lines(SUMMARY, "runs/x", from_python=True))
    assert (words["next"], words["or"]) == ('run.export("MODEL_DIR")', "run.resume(steps=120)")
    stopped = dict(closing_lines({"finished": False, "steps": 3}, "runs/x", from_python=True))
    assert stopped["next"] == "run.resume()"


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


@pytest.mark.parametrize(("called", "is_found", "word"), [("env/bin/offbeat", False, "env/bin/offbeat"),
    ("env/bin/offbeat", True, "offbeat"), ("offbeat/__main__.py", False, "offbeat")])  # fmt: skip
def test_a_command_to_copy_has_the_programs_path_where_the_shell_would_not_find_it(monkeypatch, called, is_found, word):
    monkeypatch.setattr("sys.argv", [called, "train"])
    monkeypatch.setattr("shutil.which", lambda name: "/bin/offbeat" if is_found else None)
    assert console.program() == word
