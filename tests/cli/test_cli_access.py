"""`offbeat worker token | list | revoke`, beside a coordinator that may be running."""

import json
import time

import pytest

from offbeat.cli import access, trainer
from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.launch.joining import Invitation
from offbeat.launch.run_folder import ADDRESS, CONFIG, EVENTS
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role, WorkerState, new_secret, secret_hash


@pytest.fixture
def folder(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    (tmp_path / ADDRESS).touch()
    (tmp_path / CONFIG).write_text(json.dumps({"rollout": {"lease_s": 60.0}}))
    return tmp_path


def run(*words) -> int:
    parser = Parser(prog="offbeat worker")
    access.add_arguments(parser)
    return access.run(parser.parse_args([str(word) for word in words]), [])


def joined(folder, capsys, name, *options) -> str:
    assert run("token", folder, *options) == 0
    token = capsys.readouterr().out.strip()
    secret = new_secret()
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.redeem(token, name, {}, secret_hash(secret))
    return secret


def worker_by_secret(folder, secret):
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        return ledger.worker_by_secret(secret)


def test_a_printed_token_is_good_for_its_role(folder, capsys):
    assert worker_by_secret(folder, joined(folder, capsys, "a")).role is Role.ROLLOUT
    assert (
        worker_by_secret(folder, joined(folder, capsys, "b", "--role", "trainer", "--minutes", "0.5")).role
        is Role.TRAINER
    )


def test_the_list_tells_who_joined(folder, capsys):
    assert run("list", folder) == 0
    assert "no worker has joined" in capsys.readouterr().out
    joined(folder, capsys, "box")
    run("list", folder)
    assert "box" in capsys.readouterr().out
    run("list", folder, "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["role"], row["state"], row["num_leased"]) == ("box", "rollout", "active", 0)
    assert "secret" not in str(row)


def ledger_at(folder, ago_s: float) -> Ledger:
    """The ledger as it is written so long ago."""
    return Ledger(folder / "ledger.sqlite", wall_clock=lambda: time.time() - ago_s)


def test_the_list_tells_who_is_away_and_since_when(folder, capsys):
    def listed() -> dict[str, list[str]]:
        run("list", folder)
        return {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}

    with ledger_at(folder, 3600) as ledger:
        for name, role in (("killed", Role.ROLLOUT), ("box", Role.ROLLOUT), ("big", Role.TRAINER)):
            ledger.redeem(ledger.issue_token(role, 5), name, {}, secret_hash(new_secret()))
    with ledger_at(folder, 0) as ledger:
        ledger.note_seen({"killed": time.time() - 600, "box": time.time() - 30, "big": time.time() - 300})
    found = listed()
    assert {name: cells[2] for name, cells in found.items()} == {"killed": "away", "box": "active", "big": "active"}
    assert found["killed"][-3:] == ["10", "min", "ago"]
    assert int(found["box"][-3]) in range(30, 60)
    run("list", folder, "--json")
    assert [worker["is_away"] for worker in json.loads(capsys.readouterr().out)] == [True, False, False]
    with ledger_at(folder, 1200) as ledger:  # the coordinator has ended, so nobody is there
        ledger.note_seen({})
        ledger.move_worker("box", WorkerState.LEFT)
    assert {name: cells[2] for name, cells in listed().items()} == {"killed": "away", "box": "left", "big": "away"}


@pytest.mark.parametrize("lease_s, state", [(10.0, "away"), (60.0, "active")])
def test_who_has_not_called_for_its_lease_time_is_away(folder, capsys, lease_s, state):
    (folder / CONFIG).write_text(json.dumps({"rollout": {"lease_s": lease_s}}))
    with ledger_at(folder, 9) as ledger:  # the coordinator's latest note
        ledger.redeem(ledger.issue_token(Role.ROLLOUT, 5), "killed", {}, secret_hash(new_secret()))
        ledger.redeem(ledger.issue_token(Role.ROLLOUT, 5), "busy", {}, secret_hash(new_secret()))
        ledger.note_seen({"killed": time.time() - 9 - 16, "busy": time.time() - 9 - 3})
    run("list", folder)
    states = {line.split()[0]: line.split()[2] for line in capsys.readouterr().out.splitlines()[1:]}
    assert states == {"killed": state, "busy": "active"}


def test_nobody_is_there_once_the_coordinator_has_ended(folder, capsys):
    with ledger_at(folder, 0) as ledger:
        ledger.redeem(ledger.issue_token(Role.TRAINER, 5), "big", {}, secret_hash(new_secret()))
        ledger.note_seen({"big": time.time()})
        ledger.note_seen({}, is_last=True)
    end = {"event": "end", "step": 3, "finished": False}
    for events, state in (([], "away"), ([end], "away"), ([end, end | {"finished": True}], "finished")):
        (folder / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
        run("list", folder)
        assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["big", "trainer", state]


def test_no_token_is_printed_that_nobody_could_use(folder, capsys):
    end, again = ({"event": "end", "step": 3, "finished": True}, {"event": "reopen"})
    (folder / EVENTS).write_text(f"{json.dumps(end)}\n")
    with pytest.raises(UserError, match=r"the run has finished, .* to continue it, .* --resume .* --run.steps N"):
        run("token", folder)
    (folder / EVENTS).write_text(f"{json.dumps(end)}\n{json.dumps(again)}\n")
    assert run("token", folder) == 0
    (folder / ADDRESS).unlink()
    with pytest.raises(
        UserError, match=r"no coordinator listens for workers .*; to let workers join, .*--rollout.workers 1"
    ):
        run("token", folder)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_revoked_worker_is_revoked(folder, capsys):
    secret = joined(folder, capsys, "box")
    assert run("revoke", folder, "box", "--reason", "sold") == 0
    found = worker_by_secret(folder, secret)
    assert (found.state, found.reason) == (WorkerState.REVOKED, "sold")
    assert run("revoke", folder, "box") == 0  # again
    with pytest.MonkeyPatch.context() as patch:
        (folder / "runs").mkdir()
        (folder / "runs" / "b").symlink_to(folder)
        patch.chdir(folder)
        assert run("revoke", "box") == 0, "of the newest run"
    run("list", folder)
    assert "(sold)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, told",
    [
        (("token", "{nowhere}"), "holds no ledger"),
        (("token", "{run}", "--minutes", "0"), "minutes is 0"),
        (("token", "{run}", "--role", "admin"), "invalid choice"),
        (("token", "{run}", "--json"), "--json goes with offbeat worker list"),
        (("list", "{run}", "--role", "trainer"), "--role goes with offbeat worker token"),
        (("list", "{run}", "box"), "NAME goes with offbeat worker revoke"),
        (("revoke", "{run}"), "a worker's NAME is missing"),
        (("revoke", "{run}", "bok"), "did you mean box"),
        (("revoke", "{run}", "entirely-else"), "offbeat worker list"),
    ],
)
def test_mistakes_are_told_in_one_line(folder, capsys, words, told):
    joined(folder, capsys, "box")
    filled = [word.format(nowhere=folder / "absent", run=folder) for word in words]
    with pytest.raises(UserError, match=told) as error:
        run(*filled)
    assert "\n" not in str(error.value)


def test_every_word_about_joining_reaches_the_invitation(tmp_path):
    parser = Parser()
    trainer.add_join_arguments(parser, "trainer")
    words = "--token-file t --ca-file c --patience 7 --allow-plain --trust-coordinator --secrets-file s"
    arguments = parser.parse_args(["--join", "http://host:1", *words.split()])
    found = trainer.invitation_of(arguments, Role.TRAINER, tmp_path, "n")
    assert found == Invitation(
        url="http://host:1",
        role=Role.TRAINER,
        folder=tmp_path,
        name="n",
        token_file=arguments.token_file,
        ca_file=arguments.ca_file,
        patience_s=7.0,
        allow_plain=True,
        trusts_coordinator=True,
        secrets_file=arguments.secrets_file,
    )
    assert [str(path) for path in (found.token_file, found.ca_file, found.secrets_file)] == ["t", "c", "s"]


def test_a_run_whose_coordinator_is_still_starting_is_told_apart_from_no_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no ledger yet; wait until its coordinator has started"):
        run("token", tmp_path)
