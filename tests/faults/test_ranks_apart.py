"""Two ranks on two machines, with a link of 1 Gbit/s and 5 ms between them, which is cut for a while: the run ends in
the weights of one rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gangs import environment_of, free_port
from slow_link import slow_link
from supervised_runs import TINY, check_whole, final_digest
from two_machines import HOME, NotPermitted

pytestmark = pytest.mark.full
STEPS, LOST_AFTER_S = 20, 4
OFFBEAT = [sys.executable, "-m", "offbeat"]
EXACT = [*TINY, "--run.exact", "--rollout.workers=1", "--batch.tokens-per-microbatch=64", "--checkpoint.every=1"]
EXACT += [f"--run.steps={STEPS}", f"--trainer.lost-after-s={LOST_AFTER_S}", "--trainer.start-within-s=60"]


def until(is_true: Callable[[], object], within_s: float = 150.0) -> None:
    until_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < until_s, "waited too long"
        time.sleep(0.1)


class Machines:
    """Processes on the two machines, and their logs."""

    def __init__(self, link, folder: Path):
        self.link, self.folder = link, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, side: int, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            given = {"env": {**os.environ, **environment}, "stdout": log, "stderr": log}
            self.processes.append(subprocess.Popen([*self.link.words[side], *OFFBEAT, *words], **given))
        return self.processes[-1]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path):
    try:
        with slow_link(bits_per_s=1e9, delay_s=0.005) as link:
            made = Machines(link, tmp_path)
            yield made
            made.end()
    except NotPermitted as why:
        pytest.skip(f"network namespaces: {why}")


@pytest.mark.timeout(900)
def test_ranks_apart_end_in_the_weights_of_one_rank_though_their_link_is_cut(machines, tmp_path):
    alone = [*OFFBEAT, "train", *EXACT, f"--run.dir={tmp_path / 'alone'}"]
    subprocess.run(alone, check=True, timeout=280, capture_output=True)

    path = tmp_path / "a"
    serving = machines.start(0, "serve", "serve", *EXACT, f"--run.dir={tmp_path}", "--log.console=plain")
    until(lambda: "http://" in machines.log("serve"))
    url = re.search(r"http://[\d.:]+", machines.log("serve"))[0]

    def token(role: str) -> dict[str, str]:
        words = [*OFFBEAT, "worker", "token", str(path), "--role", role]
        told = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
        return {"OFFBEAT_TOKEN": told.strip().splitlines()[-1]}

    def join(role: str, folder: str) -> list[str]:
        return [role, "--join", url, "--dir", str(tmp_path / folder), "--trust-coordinator", "--allow-plain"]

    def gang(name: str, **environment: str) -> list[subprocess.Popen[bytes]]:
        port, started = free_port(), []
        for rank in (0, 1):
            place = environment_of(rank, 2, port) | {"MASTER_ADDR": HOME, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            place |= {"GLOO_SOCKET_IFNAME": machines.link.devices[rank]} | environment
            words = [*join("trainer", "ranks"), f"--trainer.lost-after-s={LOST_AFTER_S}"]
            started.append(machines.start(rank, f"{name}-{rank}", *words, **place))
        return started

    def num_steps() -> int:
        file = path / "metrics.jsonl"
        rows = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
        return sum("reward" in row for row in rows)

    machines.start(0, "worker", *join("worker", "worker"), **token("rollout"))
    ranks = gang("first", **token("trainer"))
    until(lambda: num_steps() >= 5)
    carried = machines.link.num_bytes
    assert carried > 100_000, "the ranks' data crosses the link"
    machines.link.is_cut = True
    statuses = [rank.wait(60) for rank in ranks]
    assert 0 not in statuses
    assert num_steps() < STEPS, "the run had ended before"
    assert re.search(rf"rank 1 .* has not answered for {LOST_AFTER_S} s", machines.log("first-0"))
    machines.link.is_cut = False
    gang("second")
    assert serving.wait(300) == 0, machines.log("serve") + machines.log("second-0")
    check_whole(path, STEPS)
    assert final_digest(path) == final_digest(tmp_path / "alone" / "a")
