"""URLs with passwords in a configuration: kept in one private file, and nowhere else."""

import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.cli.main import main
from offbeat.cli.preview import preview
from offbeat.cli.train import resolve
from offbeat.config import from_dict, load, resolved, secrets
from offbeat.config.explain import show
from offbeat.errors import UserError
from offbeat.launch.joining import Invitation, own_config
from offbeat.launch.run_folder import RunFolder
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role
from offbeat.net import shown

STORE, BACKUP = "s3://AKIA:pass%2Fword@bucket/run", "https://host/ledger?sig=hidden&x=1"
HIDDEN = ("AKIA", "pass%2Fword", "sig=hidden")


def config(tmp_path, *words: str):
    return load(None, [f"--run.dir={tmp_path}", "--run.name=a", f"--weights.store={STORE}", *words])


@pytest.mark.parametrize(
    "text, cut",
    [
        ("s3://key:secret@bucket/run", "s3://bucket/run"),
        ("https://TOKEN@host:8080/a?x=1#y", "https://host:8080/a"),
        ("cannot reach s3://k:s@b/r, and https://h/p?sig=1 neither", "cannot reach s3://b/r, and https://h/p neither"),
        ("s3://key:with/slash@bucket/run", "s3://bucket/run"),
        ("http://127.0.0.1:8700/run@2", "http://127.0.0.1:8700/run@2"),
        ("s3://bucket/run@2", "s3://bucket/run@2"),
        ("runs/a?b=c", "runs/a?b=c"),
        ("ann@host", "ann@host"),
    ],
)
def test_a_url_is_shown_without_login_and_query(text, cut):
    assert shown(text) == cut


@given(st.from_regex(r"[A-Za-z0-9%._~-]{1,12}:[A-Za-z0-9%._~!*+,;=-]{6,20}", fullmatch=True), st.sampled_from("sha"))
def test_no_login_is_ever_shown(login, scheme):
    url = f"{scheme}3://{login}@bucket/run"
    assert shown(url) == f"{scheme}3://bucket/run"
    assert login not in show({"store": [url, {"inner": url}]})


def test_neither_files_nor_events_of_a_run_hold_a_secret_but_one_that_is_private(tmp_path):
    with RunFolder.create(config(tmp_path, f"--ledger.backup={BACKUP}")) as folder:
        folder.event("backup", error=f"{BACKUP}: 403")
    kept = folder.path / "secrets.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text()) == {"weights.store": STORE, "ledger.backup": BACKUP}
    others = [file for file in folder.path.rglob("*") if file.is_file() and file != kept]
    assert {"config.json", "events.jsonl"} <= {file.name for file in others}
    assert not [file for file in others for hidden in HIDDEN if hidden in file.read_text()]
    assert json.loads((folder.path / "config.json").read_text())["weights"]["store"] == "s3://bucket/run"


def begun(tmp_path) -> None:
    """A run that can be resumed."""
    with RunFolder.create(config(tmp_path)) as folder, Ledger(folder.ledger):
        pass


def test_a_run_is_resumed_with_its_secrets(tmp_path):
    begun(tmp_path)
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    found, _ = resolve(None, [], str(tmp_path / "a"))
    assert found.weights.store == STORE
    with RunFolder.open(tmp_path / "a") as folder:
        assert folder.config.weights.store == STORE
    assert "config_change" not in (tmp_path / "a" / "events.jsonl").read_text()


def test_a_secret_that_changed_is_kept_and_the_change_shows_none(tmp_path):
    begun(tmp_path)
    RunFolder.open(tmp_path / "a", config(tmp_path, "--weights.store=s3://NEW:word@bucket/other")).close()
    change = json.loads((tmp_path / "a" / "events.jsonl").read_text().splitlines()[-1])
    assert (change["old"], change["new"]) == ("s3://bucket/run", "s3://bucket/other")
    RunFolder.open(tmp_path / "a", config(tmp_path, "--weights.store=/mnt/store")).close()
    assert not (tmp_path / "a" / "secrets.json").exists()


def test_a_configuration_that_was_edited_since_wins_over_a_secret_of_before(tmp_path):
    RunFolder.create(config(tmp_path)).close()
    file = tmp_path / "a" / "config.json"
    file.write_text(file.read_text().replace("s3://bucket/run", "s3://bucket/other"))
    assert load(file).weights.store == "s3://bucket/other"


def test_secrets_that_others_can_read_are_refused(tmp_path):
    RunFolder.create(config(tmp_path)).close()
    (tmp_path / "a" / "secrets.json").chmod(0o644)
    with pytest.raises(UserError, match=r"secrets\.json holds secrets and is open to other users; run chmod 600 "):
        load(tmp_path / "a" / "config.json")


def test_neither_a_dry_run_nor_an_error_shows_a_secret(tmp_path, capsys):
    said = "\n".join(preview(config(tmp_path, f"--ledger.backup={BACKUP}")))
    assert "s3://bucket/run" in said
    assert not [hidden for hidden in HIDDEN if hidden in said]
    assert main(["train", f"--engine.url={STORE}", "--dry-run"]) == 2  # the default engine has no server
    assert "s3://bucket/run" in (err := capsys.readouterr().err)
    assert not [hidden for hidden in HIDDEN if hidden in err]


def test_a_worker_adds_its_own_secrets_to_what_it_is_told(tmp_path):
    data = secrets.shown_value(resolved(from_dict({}, {"weights.store": STORE})))
    assert data["weights"]["store"] == "s3://bucket/run"
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"weights.store": STORE}))
    file.chmod(0o600)
    invitation = Invitation("http://x", Role.ROLLOUT, tmp_path, "w", secrets_file=file)
    assert own_config(invitation, data, []).weights.store == STORE
    assert "AKIA" not in (tmp_path / "rollout-config.json").read_text()
    with pytest.raises(UserError, match=r"^--secrets-file .*none\.json: there is no such file$"):
        own_config(Invitation("http://x", Role.ROLLOUT, tmp_path, "w", secrets_file=tmp_path / "none.json"), data, [])
