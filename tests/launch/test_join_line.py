"""What a coordinator tells to type can be typed: one line each, an address that others reach, and no token."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from offbeat.config import from_dict
from offbeat.coordinator.api.server import Address
from offbeat.errors import UserError
from offbeat.launch import join_line
from offbeat.launch.coordinator_role import address_of
from offbeat.launch.join_line import join_lines
from offbeat.observability.console import open_console

RUN, NEAR = Path("runs/a b"), "http://127.0.0.1:4000"


def commands(url: str, address: Address, **more: str) -> list[str]:
    return [line.strip() for line in join_lines(RUN, url, NEAR, address, **more) if line.startswith("  ")]


def test_a_run_on_this_machine_alone_is_joined_from_here():
    here = "OFFBEAT_TOKEN=$(offbeat worker token 'runs/a b') offbeat worker --join http://127.0.0.1:4000"
    assert commands("http://127.0.0.1:4000", Address()) == [here]


def test_the_trainer_joins_with_a_token_of_its_own_role():
    here = "offbeat worker token 'runs/a b' --role trainer) offbeat trainer --join http://127.0.0.1:4000"
    assert commands("http://127.0.0.1:4000", Address(), role="trainer") == [f"OFFBEAT_TOKEN=$({here}"]


def test_workers_elsewhere_get_an_address_of_this_machine_and_not_that_of_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(join_line, "own_addresses", lambda: ["10.0.0.5", "172.17.0.1"])
    _, far = commands("http://0.0.0.0:8700", Address(host="0.0.0.0", is_plain=True))
    assert far == "offbeat worker --join http://10.0.0.5:8700 --allow-plain"
    _, far = commands("http://192.168.0.7:8700", Address(host="192.168.0.7", is_plain=True))
    assert far == "offbeat worker --join http://192.168.0.7:8700 --allow-plain"
    monkeypatch.setattr(join_line, "own_addresses", list)
    _, far = commands("http://[::]:8700", Address(host="::", is_plain=True))
    assert far == "offbeat worker --join http://HOST:8700 --allow-plain"
    _, far = commands("http://127.0.0.1:8700", Address(behind_proxy=True))
    assert far == "offbeat worker --join https://HOST"


def test_a_certificate_says_by_which_name_to_join_and_whether_it_must_be_named(tmp_path: Path):
    trustme = pytest.importorskip("trustme")
    signed = trustme.CA().issue_cert("*.example.org", "localhost", "127.0.0.1", "10.0.0.9", "gpu.example.org")
    file = tmp_path / "coordinator.pem"
    signed.private_key_and_cert_chain_pem.write_to_path(str(file))
    file.write_bytes(signed.cert_chain_pems[0].bytes())
    address = Address(host="0.0.0.0", certificate=file, key=file)
    _, far = commands("https://0.0.0.0:8700", address, role="reward", more=" --task.reward a.py:f")
    assert far == "offbeat worker --role reward --join https://gpu.example.org:8700 --task.reward a.py:f"


def test_an_address_that_the_certificate_does_not_cover_is_not_told(tmp_path: Path):
    trustme = pytest.importorskip("trustme")
    file = tmp_path / "coordinator.pem"
    file.write_bytes(trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].bytes())
    for host in ("0.0.0.0", "10.0.0.5"):
        address = Address(host=host, certificate=file, key=file)
        *_, told, far = join_lines(RUN, f"https://{host}:8711", NEAR, address)
        assert far == "  offbeat worker --join https://127.0.0.1:8711"
        assert "through a tunnel, because the certificate names only this machine" in told


def test_a_certificate_of_ones_own_is_to_be_trusted(tmp_path: Path):
    trustme = pytest.importorskip("trustme")
    file = tmp_path / "coordinator.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    _, far = commands("https://10.0.0.5:8700", Address(host="10.0.0.5", certificate=file, key=file))
    assert far == "offbeat worker --join https://10.0.0.5:8700 --ca-file coordinator.pem"


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_line_is_not_broken_on_a_narrow_screen(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = join_lines(RUN, "http://10.0.0.5:8700", NEAR, Address(host="10.0.0.5", is_plain=True))
    screen = io.StringIO()
    with open_console(mode, num_steps=1, file=screen) as console:
        for line in lines:
            console.note(line)
    assert all(line in [shown.rstrip() for shown in screen.getvalue().splitlines()] for line in lines)


def test_a_private_network_needs_no_certificate_if_one_says_so():
    serve = {"host": "0.0.0.0", "certificate": "plain"}
    address = address_of(from_dict({"serve": serve}))
    address.check()
    assert (address.is_plain, address.certificate, address.has_tls) == (True, None, False)
    with pytest.raises(UserError, match=r"^serve\.key = .*: is not used with"):
        address_of(from_dict({"serve": {**serve, "key": "x.pem"}}))
    with pytest.raises(UserError, match=r'serve\.certificate = "plain" turns TLS off'):
        address_of(from_dict({"serve": {"host": "0.0.0.0"}})).check()
