"""The page about two machines is true: its lines are typed on two of them, and the run finishes with nothing lost."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_reader import BLOCK, ROOT
from terminals import Terminals
from two_machines import HOME, NotPermitted, two_machines

pytestmark = pytest.mark.full
PAGE = (ROOT / "docs" / "two-machines.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")}
SMALL = "--run.steps=3 --batch.groups-per-step=2 --batch.group-size=4 --rollout.slots=8 --eval.every=0 --run.threads=1"
PACED = "--rollout.engine=paced --paced.base-s=0.02 --loss.max-logprob-gap=1000"  # a worker that needs no torch
SSH_PORT = 9022
FORWARD = """
import asyncio, sys

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(listen, port, host, to):
    async def serve(reader, writer):
        there = await asyncio.open_connection(host, int(to))
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    async with await asyncio.start_server(serve, listen, int(port)) as server:
        await server.serve_forever()

asyncio.run(main(*sys.argv[1:]))
"""
"""Stands in for ssh, which forwards a port in the same way."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Terminals, Terminals]]:
    """The coordinator's machine and the second one, each with a folder and a home of its own."""
    folders = tmp_path / "home", tmp_path / "gpu"
    for folder in folders:
        folder.mkdir()
    try:
        with two_machines() as insides:
            opened = [Terminals(*each, port="8700") for each in zip(folders, insides, strict=True)]
            scp = folders[0] / "bin" / "scp"
            scp.write_text(
                f'#!/bin/sh\nfor file; do case "$file" in gpu:) ;; *) cp "$file" {folders[1]};; esac; done\n'
            )
            scp.chmod(0o755)
            yield opened[0], opened[1]
            for terminals in opened:
                terminals.close()
    except NotPermitted as error:
        pytest.skip(f"two network namespaces are needed: {error}")


def blocks_of(section: str) -> list[list[str]]:
    """The lines of a section's sh blocks: what starts the run, what makes a token, what joins."""
    found = [text.splitlines() for language, text in BLOCK.findall(SECTIONS[section]) if language == "sh"]
    assert len(found) == 3, f"{section}: {found}"
    return found


def follow(section: str, home: Terminals, away: Terminals) -> str:
    """Types a section's lines, one terminal a block; returns what the worker has printed."""
    (*before, train), tokens, (*tunnel, join) = blocks_of(section)
    for line in before:
        home.say(line)
    run = home.start(train, SMALL, PACED)
    is_serving = (home.folder / "runs" / "swarm" / "serve.json").is_file
    home.until("the coordinator listens", lambda: is_serving() or run.poll() is not None)
    assert run.poll() is None, home.screen()
    home.say("\n".join(tokens))
    for line in tunnel:
        open_tunnel(line, home, away)
    worker = away.start(join)
    assert home.wait(run) == 0, home.screen() + away.screen()
    assert away.wait(worker) == 0, away.screen()
    summary = json.loads((home.folder / "runs" / "swarm" / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, 3)
    return away.screen()


def open_tunnel(line: str, home: Terminals, away: Terminals) -> None:
    listen, host, port = re.fullmatch(rf"ssh -f -N -L (\d+):([\d.]+):(\d+) {HOME}", line).groups()
    (home.folder / "forward.py").write_text(FORWARD)
    script = f"{sys.executable} {home.folder / 'forward.py'}"
    home.start(f"{script} {HOME} {SSH_PORT} {host} $(({port}))")
    away.start(f"{script} 127.0.0.1 $(({listen})) {HOME} {SSH_PORT}")


@pytest.mark.timeout(300)
def test_a_worker_joins_over_tls_with_the_certificate_that_the_page_makes(machines):
    home, away = machines
    told = follow("With a certificate of your own", home, away)
    assert re.search(r"joined swarm at https://10.0.0.1:8700", told)
    assert re.search(r"serves version \d+ \([\d.]+ [kM]B in", told), "its weights came over the network"
    assert "run swarm is over; nothing is left to do" in told
    assert "everything holds" in home.say("offbeat ledger verify")
    assert re.search(r"rollout +left .* s ago", home.say("offbeat worker list")), "it has signed off"
    line = next(line for line in home.screen().splitlines() if line.startswith("  offbeat worker --join https"))
    (*_, [typed]) = blocks_of("With a certificate of your own")
    assert typed == f"{line.strip()} --token-file join-token", "the coordinator prints the page's line"


@pytest.mark.timeout(300)
def test_a_worker_joins_through_a_tunnel(machines):
    assert "joined swarm at http://127.0.0.1:8700" in follow("Through ssh", *machines)


@pytest.mark.timeout(300)
def test_a_worker_joins_in_plain_where_both_sides_allow_it(machines):
    home, away = machines
    assert "joined swarm at http://10.0.0.1:8700" in follow("Plain HTTP in a private network", home, away)


def test_the_page_installs_as_the_page_about_that_does():
    (lines,) = [text for language, text in BLOCK.findall(SECTIONS["Install on both"]) if not language]
    assert lines.strip() in (ROOT / "docs" / "install.md").read_text()
