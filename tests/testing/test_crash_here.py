"""Crash points: each is named once in the code, and kills its process when it is asked to."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import offbeat
from offbeat.testing import crash_points

SOURCE = Path(offbeat.__file__).parent
COME_BY_THRICE = """
from offbeat.testing.crash_points import crash_here
for time in range(3):
    print(time, flush=True)
    crash_here("generated")
"""


def come_by(**environment: str) -> tuple[int, list[str]]:
    """The status of a process that passes a point three times, and how often it began to."""
    command = [sys.executable, "-c", COME_BY_THRICE]
    done = subprocess.run(command, env={"PYTHONPATH": str(SOURCE.parent), **environment}, stdout=-1, check=False)
    return done.returncode, done.stdout.decode().split()


def test_the_list_names_every_point_in_the_code_and_each_stands_in_one_place():
    in_code = [name for file in SOURCE.rglob("*.py") for name in re.findall(r'crash_here\("(.+?)"\)', file.read_text())]
    assert sorted(in_code) == sorted(name for names in crash_points.POINTS.values() for name in names)


def test_nobody_dies_unless_asked_to():
    assert come_by() == (0, ["0", "1", "2"])
    assert come_by(OFFBEAT_CRASH_AT="spooled,generated:4") == (0, ["0", "1", "2"])


def test_a_process_dies_at_the_named_point_the_named_time():
    assert come_by(OFFBEAT_CRASH_AT="generated") == (-signal.SIGKILL, ["0"])
    assert come_by(OFFBEAT_CRASH_AT="spooled,generated:3") == (-signal.SIGKILL, ["0", "1", "2"])


def test_with_a_folder_for_witnesses_each_point_kills_once(tmp_path):
    asked = {"OFFBEAT_CRASH_AT": "generated", "OFFBEAT_CRASH_ONCE": str(tmp_path)}
    assert come_by(**asked) == (-signal.SIGKILL, ["0"])
    assert [file.name for file in tmp_path.iterdir()] == ["generated"]
    assert come_by(**asked) == (0, ["0", "1", "2"])
