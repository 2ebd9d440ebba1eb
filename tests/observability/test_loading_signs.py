import io
import time

from offbeat.observability import loading as module
from offbeat.observability.loading import loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(is_so) -> None:
    deadline_s = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_log_names_only_stages_that_take_long(monkeypatch):
    monkeypatch.setattr(module, "TERMINAL_EVERY_S", 0.01)
    monkeypatch.setattr(module, "LOG_AFTER_S", 0.2)
    file = io.StringIO()
    with loading("run runs/a: model", file=file) as stage:
        stage("importing torch")
        stage("reading the model")
        until(lambda: "reading" in file.getvalue())
        time.sleep(0.1)  # ten more times that it could print
    first, *others = file.getvalue().splitlines()
    assert first == "run runs/a: model; loading"
    assert others == ["reading the model, 0 s"]


def test_a_terminal_shows_one_line_that_is_gone_in_the_end(monkeypatch):
    monkeypatch.setattr(module, "TERMINAL_EVERY_S", 0.01)
    file = Terminal()
    with loading("run runs/a: model", file=file) as stage:
        stage("importing torch")
        until(lambda: "importing torch, 0 s" in file.getvalue())
    assert file.getvalue().count("\n") == 1
    *_, blank, end = file.getvalue().split("\r")
    assert (blank.strip(), end) == ("", "")


def test_a_quiet_run_says_nothing(capsys):
    with loading("run runs/a: model", is_quiet=True) as stage:
        stage("importing torch")
    assert capsys.readouterr().out == ""
