"""How those that work for a run elsewhere find out that it is over."""

import asyncio
import threading

import pytest
from http_run import LiveRun

from offbeat.cli.main import main
from offbeat.client.credentials import Credentials, save
from offbeat.config import resolved
from offbeat.launch.joining import CREDENTIALS, OVER, Invitation, joined, report_run_over
from offbeat.ledger.workers import Role

NOWHERE = "http://127.0.0.1:9"


def come_back(folder, role: str) -> int:
    words = ["--join", NOWHERE, "--dir", str(folder), "--patience=0.1"]
    return main(["trainer", *words] if role == "trainer" else ["worker", "--role", role, *words])


@pytest.mark.parametrize("role", ["rollout", "reward", "trainer"])
def test_one_that_comes_back_when_its_run_is_over_and_nobody_serves_it_ends_in_peace(tmp_path, capsys, role):
    save(tmp_path / f"{role}-{CREDENTIALS}", Credentials(NOWHERE, "w", "secret", Role(role), "a"))
    assert come_back(tmp_path, role) == 1  # the run may go on: whoever serves it is only not there
    assert "not answered" in capsys.readouterr().err
    (tmp_path / f"{role}-{OVER}").touch()
    assert come_back(tmp_path, role) == 0
    assert capsys.readouterr() == (
        "w: run a has ended, and its coordinator answers no more; nothing is left to do\n",
        "",
    )


def test_a_run_that_goes_on_is_not_over_any_more(tmp_path, capsys):
    with LiveRun(tmp_path / "run") as run:
        served = run.server.state.served
        served.config.clear()
        served.config.update(resolved(run.config))
        token = tmp_path / "token"
        token.write_text(run.token())
        invitation = Invitation(run.server.url, Role.ROLLOUT, tmp_path / "w", "w", token_file=token, patience_s=5.0)
        invitation.folder.mkdir()

        async def scenario():
            async with joined(invitation, []) as member:
                report_run_over(invitation, member, "worker")
            assert (invitation.folder / f"rollout-{OVER}").exists()
            async with joined(invitation, []):
                assert not (invitation.folder / f"rollout-{OVER}").exists()

        asyncio.run(scenario())
    assert capsys.readouterr().out == "worker w: run live is over; nothing is left to do\n"


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_the_end_of_a_run_ends_those_that_joined_it_with_one_line_and_status_0(tmp_path, capsys, monkeypatch, role):
    paced = {"rollout": {"engine": "paced", "slots": 4, "lease_s": 60.0}}
    with LiveRun(tmp_path / "run", **paced) as run:
        served = run.server.state.served
        served.config.clear()
        served.config.update(resolved(run.config))
        monkeypatch.setenv("OFFBEAT_TOKEN", run.token(Role(role)))

        async def end_when_joined():
            while not run.coordinator.present(60.0):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            run.coordinator.end()

        ending = threading.Thread(target=run.ask, args=(end_when_joined(),))
        ending.start()
        words = ["--role", role, "--join", run.server.url, "--dir", str(tmp_path / "w"), "--name", "w"]
        assert main(["worker", *words]) == 0
        ending.join()
    out, err = capsys.readouterr()
    what = "worker" if role == "rollout" else "judge"
    assert out.splitlines()[-1] == f"{what} w: run live is over; nothing is left to do"
    assert err == ""
