"""A join file hands over URL, certificate and token, to its owner alone; a run's own certificate fits its machine."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from offbeat.config import load
from offbeat.errors import DeadlineError, UserError
from offbeat.launch import join_file
from offbeat.launch.address import address_of, own_certificate
from offbeat.launch.join_line import certificate_names
from offbeat.ledger.errors import Forbidden
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import new_secret, secret_hash


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    Ledger(path / "ledger.sqlite").close()
    return path


def test_it_has_all_that_a_worker_needs_and_nobody_else_can_read_it(run: Path, tmp_path: Path):
    file = tmp_path / "join.json"
    config = load(None, ["--serve.host=10.1.2.3", "--serve.certificate=auto"])
    join_file.write(file, run, "https://10.1.2.3:8700", config)
    assert file.stat().st_mode & 0o777 == 0o600
    read = join_file.read(file, 0.0)
    assert read.url == "https://10.1.2.3:8700"
    assert read.certificate == (run / "certificate.pem").read_text()
    assert read.token not in repr(read)
    with Ledger(run / "ledger.sqlite") as ledger:
        joined = [ledger.redeem(read.token, "w", {}, secret_hash(new_secret())).name for _ in range(3)]
    assert joined == ["w", "w-2", "w-3"]


def test_one_that_others_can_read_is_refused(tmp_path: Path):
    file = tmp_path / "join.json"
    file.write_text("{}")
    file.chmod(0o640)
    with pytest.raises(UserError, match=r"other users can read the token in it; run chmod 600"):
        join_file.read(file, 0.0)


def test_one_that_is_damaged_or_never_comes_is_named(tmp_path: Path):
    file = tmp_path / "join.json"
    with pytest.raises(DeadlineError, match=r"join.json: not there after 0 s"):
        join_file.read(file, 0.0)
    file.write_text('{"url": 3}')
    file.chmod(0o600)
    with pytest.raises(UserError, match=r"join.json: is no join file"):
        join_file.read(file, 0.0)


def test_the_runs_own_certificate_is_kept_until_the_machine_changes(tmp_path: Path):
    certificate, key = own_certificate(tmp_path, "10.1.2.3")
    assert key.stat().st_mode & 0o777 == 0o600
    assert certificate_names(certificate) == ["10.1.2.3"]
    first = certificate.read_bytes()
    assert own_certificate(tmp_path, "10.1.2.3")[0].read_bytes() == first
    own_certificate(tmp_path, "trainer.example.org")
    assert certificate_names(certificate) == ["trainer.example.org"]
    ssl.create_default_context(cafile=certificate)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)


def test_an_own_certificate_takes_no_key_and_is_made_in_the_runs_folder_only(tmp_path: Path):
    with pytest.raises(UserError, match=r'serve.key = "x": is not used with serve.certificate = "auto"'):
        address_of(load(None, ["--serve.certificate=auto", "--serve.key=x"]))
    config = load(None, ["--serve.host=0.0.0.0", "--serve.certificate=auto"])
    address_of(config).check()
    address = address_of(config, tmp_path)
    address.check()
    assert (address.has_tls, address.is_plain) == (True, False)


def test_a_token_of_a_join_file_is_for_workers_alone(run: Path, tmp_path: Path):
    join_file.write(tmp_path / "join.json", run, "http://127.0.0.1:1", load(None))
    token = join_file.read(tmp_path / "join.json", 0.0).token
    with Ledger(run / "ledger.sqlite") as ledger:
        assert ledger.redeem(token, "w", {}, secret_hash(new_secret())).role.value == "rollout"
        with pytest.raises(Forbidden, match="never issued"):
            ledger.redeem(token + "x", "w", {}, secret_hash(new_secret()))
