"""`offbeat ledger` tells a person, and a program, what a run's ledger holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ledger_run import answer, full_step, handed, new_groups, version

from offbeat.cli.main import main
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a resume behind it, and with something held, handed back and lost."""
    now = iter(range(1000, 10**6))
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2), wall_clock=lambda: float(next(now))) as ledger:
        ledger.publish(version(0, 0))
        for step in range(2):
            full_step(ledger, step)
        ledger.reconcile(1, None)
        ledger.commit(1, version(3, 2, 1))
        ledger.admit(new_groups(ledger, 3, require_version=3))
        ledger.lease("lost", 2, 3)
        ledger.lose(ledger.leased())
        begun, _ = ledger.lease("w", 2, 3)
        ledger.submit([handed(answer(begun, [3], end=None), "w", begun.fence)])
    return tmp_path


def test_show_tells_who_made_what_and_what_looks_wrong(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ledger", "show", str(run)]) == 0
    told = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    assert "step 3, from version 3" in lines["next to train"]
    assert " by w, for " in lines["oldest lease"]
    assert "1 with" in lines["partials"]
    assert "lost 1 times" in lines["suspects"]
    assert "4 published, 1 of them abandoned" in lines["versions"]
    head = ["worker", "trajectories", "tokens", "tokens/s", "leased", "partials", "failed"]
    assert re.split(r"\s\s+", lines["worker"]) == [*head, "tokens audited", "log-prob off"]
    assert lines["set aside"].split()[2:] == ["none"]
    assert lines["2"].split()[-1] == "abandoned"


def test_show_tells_the_same_as_one_line_of_json(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ledger", "show", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["oldest_lease"]["worker"] == "w"
    assert told["suspects"] == {"1": 2}
    assert told["num_partials"] == 1
    assert [made["is_abandoned"] for made in told["versions"]] == [False, False, True, False]


def test_verify_says_that_everything_holds(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ledger", "verify", str(run)]) == 0
    assert capsys.readouterr().out.endswith("everything holds\n")
