"""A copy of the zygote is like the process that it stands for: shown on both, side by side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import zygote
from support_files import SUPPORT

from offbeat.cli.main import SPIN_COUNT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.environ.get(zygote.SWITCH) == "0", reason="there is no zygote"
)
LOOK = str(SUPPORT / "reporting_process.py")
KINDS = {"copy": nullcontext, "real": zygote.no_zygote}


@pytest.fixture(params=KINDS)
def kind(request):
    with KINDS[request.param]():
        yield request.param


def look(*words: str, **how) -> dict:
    done = subprocess.run([sys.executable, LOOK, "look", *words], stdout=subprocess.PIPE, check=True, **how)
    return json.loads(done.stdout)


def both(*words: str, **how) -> tuple[dict, dict]:
    """What a copy and a real process say of themselves, without what is a copy's mark."""
    copy = look(*words, **how)
    with zygote.no_zygote():
        real = look(*words, **how)
    assert (copy.pop("has_torch"), real.pop("has_torch")) == (True, False), "the copy is none"
    return copy, real


@pytest.mark.full
def test_words_environment_folder_paths_and_session_are_those_of_a_real_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}here", "OMP_NUM_THREADS": "1", "MARK": "ä=b"}
    for session in (False, True):
        copy, real = both("two words", "", cwd=tmp_path, env=environment, start_new_session=session)
        assert copy == real
        assert (copy["leads_session"], copy["words"][1:]) == (session, ["two words", ""])
        assert copy["environment"]["MARK"] == "ä=b"


def test_a_process_gets_the_files_that_it_is_given_by_their_numbers_and_no_other():
    read, write = os.pipe()
    kept = os.open(os.devnull, os.O_RDONLY)
    copy, real = both(pass_fds=(write,), stdin=subprocess.DEVNULL, env=dict(os.environ))
    assert copy == real
    assert set(copy["files"]) == {0, 1, 2, write}
    for descriptor in (read, write, kept):
        os.close(descriptor)


@pytest.mark.parametrize(
    "words, status, said",
    [
        (["exit", "0"], 0, ""),
        (["exit", "7"], 7, ""),
        (["exit", "no eggs"], 1, "no eggs\n"),
        (["raise"], 1, "ValueError: no hen\n"),
        (["interrupt"], -signal.SIGINT, "KeyboardInterrupt\n"),
        (["die"], -signal.SIGKILL, ""),
        (["leave-late"], 0, "a thread\nan exit function\n"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_it_ends_as_a_real_process_ends(kind, words, status, said):
    done = subprocess.run([sys.executable, LOOK, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr[len(done.stderr) - len(said) :]) == (status, said), done.stderr
    assert done.stdout == "begun\n"


def test_signals_reach_it_and_asyncio_waits_for_it(kind):
    async def scenario() -> tuple[int, bytes]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, LOOK, "wait"), stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        os.killpg(process.pid, signal.SIGTERM)
        return await process.wait(), await process.stdout.read()

    assert asyncio.run(scenario()) == (-signal.SIGTERM, b"")


def test_the_zygote_lets_threads_spin_as_offbeat_does():
    assert zygote.SPIN_COUNT == SPIN_COUNT


def test_many_threads_may_ask_at_a_time():
    found: list[dict] = []
    threads = [threading.Thread(target=lambda n=number: found.append(look(str(n)))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(said["words"][1]) for said in found) == list(range(8))


def test_what_is_read_when_a_process_starts_has_it_started_for_real(monkeypatch):
    assert look()["has_torch"]
    assert not look(env={**os.environ, "OMP_WAIT_POLICY": "ACTIVE"})["has_torch"]
    assert not look(env={**os.environ, "PYTHONHASHSEED": "0"})["has_torch"]
    assert not look(preexec_fn=lambda: None)["has_torch"]
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not look()["has_torch"], "tests change their own environment too"


def test_nothing_of_offbeat_is_there_before_it_is_imported_with_the_environment_asked_for():
    died = subprocess.run(
        [sys.executable, LOOK, "come-by"], env={**os.environ, "OFFBEAT_CRASH_AT": "generated"}, stdout=subprocess.PIPE
    )
    assert died.returncode == -signal.SIGKILL
    assert look()["offbeat"] == []
