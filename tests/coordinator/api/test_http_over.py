"""How those that work for a run elsewhere find out that it is over."""

import asyncio
import threading

import pytest
from http_run import LiveRun

from offbeat.cli.main import main
from offbeat.client.credentials import Credentials, save
from offbeat.config import resolved
from offbeat.launch import worker_role
from offbeat.launch.joining import CREDENTIALS, OVER, Invitation, joined, report_run_over
from offbeat.ledger.workers import Role, WorkerState

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
        "w: run a has ended, and its coordinator does not answer any more; nothing is left to do\n",
        "",
    )


def test_one_that_comes_back_with_a_token_looks_for_the_run_that_the_token_is_for(tmp_path, capsys, monkeypatch):
    save(tmp_path / f"rollout-{CREDENTIALS}", Credentials(NOWHERE, "w", "secret", Role.ROLLOUT, "a"))
    (tmp_path / f"rollout-{OVER}").touch()
    monkeypatch.setenv("OFFBEAT_TOKEN", "of-a-new-run")
    assert come_back(tmp_path, "rollout") == 1
    assert "POST /v1/join: not answered" in capsys.readouterr().err


def test_a_worker_that_is_interrupted_while_it_loads_has_left(tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_role, "engines_of", interrupt)
    with LiveRun(tmp_path / "run") as run:
        served = run.server.state.served
        served.config.clear()
        served.config.update(resolved(run.config))
        monkeypatch.setenv("OFFBEAT_TOKEN", run.token())
        words = ["--join", run.server.url, "--dir", str(tmp_path / "w"), "--name", "w"]
        assert main(["worker", *words]) == 130
        assert [(worker.name, worker.state) for worker in run.ledger.list_workers()] == [("w", WorkerState.LEFT)]


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
@pytest.mark.parametrize(
    ("interrupted", "told"),
    [
        ("", "run live is over; nothing is left to do"),
        (
            "stopped at step 3 of 12",
            "run live was stopped at step 3 of 12; start this {what} again after the resume (it needs no token)",
        ),
    ],
)
def test_the_end_of_a_run_ends_those_that_joined_it_with_one_line_and_status_0(
    tmp_path, capsys, monkeypatch, role, interrupted, told
):
    paced = {"rollout": {"engine": "paced", "slots": 4, "lease_s": 60.0}}
    with LiveRun(tmp_path / "run", **paced) as run:
        served = run.server.state.served
        served.config.clear()
        served.config.update(resolved(run.config))
        monkeypatch.setenv("OFFBEAT_TOKEN", run.token(Role(role)))

        async def end_when_joined():
            while not run.coordinator.present(60.0):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            run.coordinator.end(interrupted)

        ending = threading.Thread(target=run.ask, args=(end_when_joined(),))
        ending.start()
        words = ["--role", role, "--join", run.server.url, "--dir", str(tmp_path / "w"), "--name", "w"]
        assert main(["worker", *words]) == 0
        ending.join()
    out, err = capsys.readouterr()
    what = "worker" if role == "rollout" else "judge"
    assert out.splitlines()[-1] == f"{what} w: {told.format(what=what)}"
    assert err == ""
    has_finished = (tmp_path / "w" / f"{role}-{OVER}").exists()
    assert has_finished == (not interrupted), "one that starts again waits for the resume of a run that was stopped"
