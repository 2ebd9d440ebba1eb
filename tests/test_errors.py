"""Errors in a notebook: IPython asks them for the lines to show."""

from __future__ import annotations

import pytest

import offbeat
from offbeat.errors import UserError


def test_a_notebook_shows_the_users_own_line_and_the_message():
    with pytest.raises(UserError) as caught:
        offbeat.train(lr=-1)
    at, told = caught.value._render_traceback_()
    assert at.endswith("offbeat.train(lr=-1)")
    assert told == f"UserError: {caught.value}"


def test_ipython_shows_these_lines_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_cell("import offbeat\nprint('begun')\noffbeat.train(lr=-1)")
    told = capsys.readouterr()
    begun, at, what = (told.out + told.err).strip().splitlines()
    assert (begun, at) == ("begun", "----> 3 offbeat.train(lr=-1)")
    assert what.startswith("UserError: optimizer.lr = -1: ")
