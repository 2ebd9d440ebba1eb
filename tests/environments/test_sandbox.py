"""What code in a sandbox can and cannot do. Every attack is really run."""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from offbeat.environments import sandbox, wire
from offbeat.environments.child import load_part
from offbeat.environments.sandbox import MAX_OUTPUT_CHARS, MAX_PROCESSES, PythonSandbox, SandboxMissing, check_sandbox
from offbeat.environments.tools import tools_of

try:
    check_sandbox()
    WHY = ""
except SandboxMissing as missing:
    WHY = str(missing)

OF_PYTHON = {Path(path).parts[2] for path in (sys.prefix, sys.base_prefix) if Path(path).parts[1] == "tmp"}
"""What a sandbox shows in /tmp because this Python lies there."""
sandboxed = pytest.mark.skipif(bool(WHY), reason=WHY or "there is a sandbox")


def run(*codes, **limits):
    """What an interpreter answers to codes, one after another."""

    async def run_all():
        box = PythonSandbox(**limits)
        try:
            return [await box.python(code) for code in codes]
        finally:
            await box.close()

    return asyncio.run(run_all())


def last_line(text):
    return text.strip().splitlines()[-1]


def processes(word):
    """Processes of this machine with a word in their command."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in command.read_bytes().decode(errors="replace"):
                found.append(int(command.parent.name))
        except OSError:
            pass
    return found


@sandboxed
def test_an_interpreter_keeps_its_variables_and_tells_values_prints_and_errors():
    told = run(
        "x = 3\nprint('hi')\nx * 2", "x += 1", "print(x)", "def f():\n    return x / 0\nf()", "raise SystemExit(4)", "x"
    )
    assert told[:3] == ["hi\n6", "", "4\n"]
    assert told[3].splitlines()[:2] == ["Traceback (most recent call last):", '  File "<code>", line 3, in <module>']
    assert last_line(told[3]) == "ZeroDivisionError: division by zero"
    assert told[4:] == ["SystemExit: 4", "4"]


@sandboxed
def test_a_sandbox_sees_neither_files_nor_variables_nor_processes_nor_network(tmp_path, monkeypatch):
    secret = tmp_path / "secret.txt"
    secret.write_text("the password")
    monkeypatch.setenv("OFFBEAT_TOKEN", "hidden")
    told = run(
        f"open({str(secret)!r}).read()",
        f"open({str(Path.home() / '.bashrc')!r}).read()",
        "import os; sorted(os.environ)",
        "len([p for p in os.listdir('/proc') if p.isdigit()])",
        "open('/etc/passwd').read()",
        "import socket; socket.create_connection(('1.1.1.1', 80), 2)",
        f"os.getuid() == 0, [name for name in os.listdir('/tmp') if name not in {sorted(OF_PYTHON)}]",
        "open('/usr/x', 'w')",
        "import numpy; int(numpy.arange(4).sum())",
    )
    assert "No such file" in told[0]
    assert "No such file" in told[1]
    assert "TOKEN" not in told[2]
    assert told[3] == "2"
    assert "No such file" in told[4]
    assert "unreachable" in told[5]
    assert told[6] == "(False, [])"
    assert "Read-only" in told[7] or "Permission denied" in told[7]
    assert told[8] == "6", "the packages of this Python are there"


FORKS = """
import os, time
n = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(100)
        n += 1
    except OSError:
        break
n
"""
EATS_WITH_MANY = """
import os, time
for i in range(8):
    if os.fork() == 0:
        b = bytearray(100 << 20)
        for j in range(0, len(b), 4096):
            b[j] = 1
        time.sleep(30)
time.sleep(20)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        open('/tmp/alive', 'w')
        time.sleep(1000)
    os._exit(0)
"""


@pytest.mark.full
@sandboxed
def test_fork_bombs_and_daemons_are_limited_and_end_with_their_call():
    bomb, left, daemon, later = run(
        FORKS,
        "len([p for p in os.listdir('/proc') if p.isdigit()])",
        DAEMON,
        f"time.sleep(1.2); [name for name in os.listdir('/tmp') if name not in {sorted(OF_PYTHON)}]",
    )
    assert int(bomb) < MAX_PROCESSES
    assert left == "2", "bwrap and the interpreter"
    assert (daemon, later) == ("", "[]")


@pytest.mark.full
@sandboxed
def test_memory_and_disk_have_limits():
    told = run(
        "b = bytearray(2 << 30)",
        "with open('/tmp/a', 'wb') as f:\n    for i in range(100): f.write(bytes(1 << 20))",
        "for k in range(9):\n    with open(f'/tmp/{k}', 'wb') as f: f.write(bytes(9 << 20))",
        "1 + 1",
        memory_mb=256,
    )
    assert last_line(told[0]) == "MemoryError"
    assert "File too large" in told[1]
    assert "No space left" in told[2]
    assert told[3] == "2"


@pytest.mark.full
@sandboxed
def test_many_processes_share_one_limit_of_memory():
    told, after = run(EATS_WITH_MANY, "1 + 1", memory_mb=256)
    assert told == "error: it used more than 256 MiB of memory; the next call begins with a new interpreter"
    assert after == "2"


@sandboxed
@pytest.mark.parametrize(
    "code",
    ["import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.kill(1, 9)", "import os; os.kill(-1, 9)"],
)
def test_killing_its_parent_harms_nobody_else(code):
    told, after = run(code, "1 + 1")
    assert after == "2"
    assert "Error" in told or told.startswith("error:") or told == ""


@sandboxed
@pytest.mark.parametrize("code", ["import os; os._exit(3)", "import os; os.closerange(0, 100)"])
def test_code_that_ends_its_interpreter_is_told_so(code):
    told, after = run(code, "1 + 1")
    assert told == "error: the code has ended the interpreter; the next call begins with a new interpreter"
    assert after == "2"


@pytest.mark.full
@sandboxed
def test_a_megabyte_of_output_is_cut_in_the_middle():
    (told,) = run("import sys\nprint('begin', 'a' * 3_000_000, 'end')\nprint('b', file=sys.stderr)")
    assert len(told) < MAX_OUTPUT_CHARS + 100
    assert told.startswith("begin aaa")
    assert "characters left out]" in told
    assert told.endswith("aaa end\nb\n")
    (value,) = run("'c' * 3_000_000")
    assert len(value) <= MAX_OUTPUT_CHARS


@pytest.mark.full
@sandboxed
def test_code_that_never_returns_is_ended_with_all_that_it_started():
    start_s = time.monotonic()
    told, after = run("import time, os\nprint('begun')\nos.fork()\nwhile True: pass", "1 + 1", timeout_s=1.0)
    assert told.endswith("error: no end within 1 s; the next call begins with a new interpreter")
    assert told.startswith("begun\n")
    assert after == "2"
    assert time.monotonic() - start_s < 20


@sandboxed
def test_nothing_is_left_when_an_episode_ends():
    async def episode():
        box = PythonSandbox(memory_mb=333)
        await box.python("import os, time\nif os.fork() == 0: time.sleep(100)")
        mine = processes("/interpreter.py\x004\x00333") or processes("\x00333\x00")
        await box.close()
        return mine

    assert asyncio.run(episode())
    deadline_s = time.monotonic() + 10
    while (left := processes("\x00333\x00")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


@pytest.mark.full
@sandboxed
def test_a_call_that_is_cancelled_ends_its_interpreter():
    async def cancelled():
        box = PythonSandbox(memory_mb=334)
        running = asyncio.ensure_future(box.python("while True: pass"))
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait({running})
        return await box.python("1 + 1"), await box.close()

    assert asyncio.run(cancelled())[0] == "2"
    deadline_s = time.monotonic() + 10
    while (left := processes("\x00334\x00")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []


def test_a_machine_without_bwrap_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxMissing) as caught:
        check_sandbox()
    assert str(caught.value) == (
        'tools = ["python"]: there is no bwrap to make a sandbox with; on Debian: apt install bubblewrap'
    )


def test_a_bwrap_that_may_not_make_namespaces_is_told_in_one_line(monkeypatch, tmp_path):
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SandboxMissing, match=r"bwrap cannot make a sandbox here \(No permissions"):
        check_sandbox()
    assert sandbox.INSTALL


@sandboxed
def test_the_entry_python_is_one_tool_of_that_name_which_a_process_of_environments_runs():
    part = load_part("sums", wire.PartSpec("", {}, ("python",)))
    assert [tool.name for tool in part.info.tools] == ["python"]
    (kind,) = part.classes
    assert [tool.name for tool in tools_of(kind(), "python")] == ["python"]
