"""Exit statuses of roles that are stopped, as shells and schedulers know them."""

import pytest

from offbeat.cli.trainer import exit_status


@pytest.mark.parametrize(
    ("stopped_by", "status", "told"),
    [
        (None, 0, ""),
        ("run.max_hours = 1", 0, ""),
        ("SIGTERM", 143, "offbeat: worker stopped by SIGTERM\n"),
        ("SIGINT", 130, "offbeat: worker stopped by SIGINT\n"),
    ],
)
def test_a_signal_is_told_by_its_number_and_everything_else_is_a_success(stopped_by, status, told, capsys):
    assert exit_status("worker", stopped_by) == status
    assert capsys.readouterr().err == told
