"""The console of a notebook: one output, which is redrawn. tests/docs runs a notebook with a real kernel."""

import sys
from types import SimpleNamespace

import pytest

from offbeat.observability.console import PlainConsole, in_notebook, open_console
from offbeat.observability.notebook import MAX_TEXTS, NUM_ROWS, NotebookConsole

pytest.importorskip("IPython")


class Output:
    """What a notebook's cell shows, and how often it was drawn anew."""

    def __init__(self) -> None:
        self.num_outputs = self.num_updates = 0
        self.data: dict[str, str] = {}

    def display(self, data, *, raw, display_id):
        assert raw
        assert display_id
        self.num_outputs += 1
        self.data = data
        return self

    def update(self, data, *, raw):
        assert raw
        self.num_updates += 1
        self.data = data


@pytest.fixture
def output(monkeypatch) -> Output:
    import IPython.display

    shown = Output()
    monkeypatch.setattr(IPython.display, "display", shown.display)
    return shown


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_long_run_leaves_one_output_with_its_newest_steps_and_the_curve(output):
    pytest.importorskip("matplotlib")
    clock = Clock()
    with NotebookConsole(500, clock=clock) as console:
        for step in range(1, 501):
            clock.now_s += 0.1
            console.step({"step": step, "reward": step / 500})
            console.doing("answers 3/8")
        console.finish({"steps": 500, "reward_first": 0.1, "reward_last": 0.9}, "runs/x")
    assert output.num_outputs == 1
    assert output.num_updates <= 60  # once a second
    lines = output.data["text/plain"].splitlines()
    assert lines[0].split()[:2] == ["step", "reward"]
    assert [line.split()[0] for line in lines[1 : NUM_ROWS + 1]] == [f"{n}/500" for n in range(489, 501)]
    assert "0.100 → 0.900" in lines[NUM_ROWS + 1]
    assert "answers" not in output.data["text/plain"]
    assert output.data["text/html"].count("data:image/png;base64,") == 1


def test_what_happens_within_a_step_and_what_to_act_upon_is_shown(output):
    clock = Clock()
    with NotebookConsole(5, clock=clock) as console:
        clock.now_s = 12.0
        console.doing("answers <3>/8")
        assert output.data["text/plain"] == "answers <3>/8, 12.0 s"
        assert "answers &lt;3&gt;/8" in output.data["text/html"]
        console.alarm("look here")
        assert "warning: look here" in output.data["text/plain"]
        for number in range(100):
            console.note(f"note {number}")
    assert len(output.data["text/plain"].splitlines()) == MAX_TEXTS


def test_a_kernel_is_known_by_its_shell(monkeypatch):
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None)))
    assert not in_notebook()  # a terminal's IPython
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    assert in_notebook()
    assert isinstance(open_console("plain", 3), PlainConsole)
