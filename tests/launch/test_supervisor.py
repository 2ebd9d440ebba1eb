"""Lines that the supervisor prints about the processes that it keeps running."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from offbeat.config import load
from offbeat.launch.supervisor import Child, Supervisor


@pytest.mark.parametrize("console", ["plain", "quiet"])
def test_a_death_is_told_in_a_line_with_what_comes_next_and_a_normal_end_is_not(
    console, tmp_path: Path, capfd, monkeypatch
):
    ends = ["kill -9 $$", "exit 1", "exit 1", "exit 0"]
    supervisor = Supervisor(load(None, [f"--log.console={console}"]), (), ())
    (tmp_path / "logs").mkdir()
    supervisor.run = tmp_path

    async def start(child: Child) -> None:
        child.process = await asyncio.create_subprocess_shell(ends.pop(0))

    monkeypatch.setattr(supervisor, "_start", start)
    log = tmp_path / "logs" / "worker-1.log"
    asyncio.run(supervisor._keep(Child("worker-1", (), log)))
    assert not ends
    told = [
        "worker-1 died (signal 9); starting again",
        f"worker-1 died (exit status 1); see {log}; starting again in 0.5 s",
        f"worker-1 died (exit status 1); see {log}; starting again in 1 s",
    ]
    assert capfd.readouterr().out.splitlines() == (told if console == "plain" else [])
