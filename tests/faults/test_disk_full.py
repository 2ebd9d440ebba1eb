"""A disk that fails, wherever a run writes: one line that names the file, nothing lost, and a run that can go on.

Whichever file: calls of the C library are made to fail, for each kind of file in turn. A checkpoint that does not fit:
as root on Linux the disk is a real one, a tmpfs of a few megabytes. Elsewhere a limit on the size of files stands in
for it: weights fit, a checkpoint, three times as large, does not.
"""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faulty_disk import no_file_over
from support_files import SUPPORT

from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import TINY_FOLDER
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Version, WeightsError

WITHIN_S = 120.0
WEIGHTS_BYTES = (TINY_FOLDER / "model.safetensors").stat().st_size
CHECKPOINT_BYTES = 3 * WEIGHTS_BYTES
"""Masters and two moments, all as wide as the shipped weights."""
FULL_BYTES = 2 * WEIGHTS_BYTES + 2 * CHECKPOINT_BYTES - WEIGHTS_BYTES
"""Room for one checkpoint and for a version being written beside two others, but not for a second checkpoint."""
LEDGER_IS_FULL = (
    r"offbeat: ledger runs/a/ledger\.sqlite: database or disk is full; free space on its disk, then resume .*\n"
)
WEIGHTS_ARE_CUT = (
    r"offbeat: cannot write the weights of step 3 to .*/weights/00000003: .*No space left.*; free space.*, "
    r"then resume the run\n"
)
QUICK = (
    *("--batch.groups-per-step=2", "--batch.group-size=2", "--rollout.slots=4", "--rollout.max-new-tokens=8"),
    *("--eval.every=0", "--run.threads=1", "--log.console=quiet", "--run.name=a", "--checkpoint.every=1"),
)


@pytest.fixture
def disk(tmp_path):
    """A folder, and whether it is a small disk of its own."""
    is_mounted = sys.platform == "linux" and os.geteuid() == 0 and mount("tmpfs", tmp_path, FULL_BYTES)
    yield tmp_path, is_mounted
    if is_mounted:
        subprocess.run(["umount", tmp_path], check=True)


def mount(what: str, folder: Path, num_bytes: int) -> bool:
    """Whether a tmpfs could be mounted, or mounted anew with another size; in a container not even root may."""
    options = f"size={num_bytes}" if what == "tmpfs" else f"remount,size={num_bytes}"
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, what, folder], check=False).returncode == 0


def train(folder: Path, *words: str, max_file_bytes: int | None = None, **environment: str) -> tuple[int, str]:
    """The real command's status and what it says on stderr."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, resource.RLIM_INFINITY))

    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "train", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        preexec_fn=limit_files if max_file_bytes is not None else None,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.full
def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(disk):
    folder, is_mounted = disk
    run = folder / "runs" / "a"
    if is_mounted:
        status, errors = train(folder, *QUICK, "--run.steps=3")
    else:
        assert train(folder, *QUICK, "--run.steps=1") == (0, "")
        resumed = ("--resume", "runs/a", "--run.steps=3")
        status, errors = train(folder, *resumed, max_file_bytes=(WEIGHTS_BYTES + CHECKPOINT_BYTES) // 2)
    told = r"offbeat: cannot write the checkpoint of step 2 to runs/a/checkpoints: .*(No space left|File too large).*; "
    told += r"the checkpoint of step 1 is intact; free space.*, then resume the run\n"
    # While the checkpoint is written, samples come in and the next version is written: now and then it is the ledger or
    # the version that meets the end of the disk.
    others = f"{LEDGER_IS_FULL}|{WEIGHTS_ARE_CUT}"
    assert re.fullmatch(told, errors) or (is_mounted and re.fullmatch(others, errors)), errors
    assert status == 1
    assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["00000001"]
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    told_there = errors.removeprefix("offbeat: ").rstrip()
    assert (last["event"], last["error"].endswith(told_there)) == ("error", True)

    if is_mounted:
        assert mount("remount", folder, 2 * FULL_BYTES)
    assert_goes_on(folder)


@pytest.mark.full
def test_a_disk_full_to_the_last_byte_stops_the_run_with_one_line_and_it_goes_on_when_there_is_space(disk):
    folder, is_mounted = disk
    if not is_mounted:
        pytest.skip("a disk of a few bytes can be mounted by root on Linux alone")
    assert mount("remount", folder, 2 * FULL_BYTES)
    assert train(folder, *QUICK, "--run.steps=1") == (0, "")
    ballast = folder / "ballast"
    fill(ballast)
    status, errors = train(folder, "--resume", "runs/a", "--run.steps=3")
    assert (errors.count("\n"), errors.startswith("offbeat: ")) == (1, True), errors
    assert status in (1, 2)
    assert re.search(r"disk is full|No space left|check that its disk works and has free space", errors), errors

    ballast.unlink()
    assert_goes_on(folder, "--run.steps=3")


def fill(path: Path) -> None:
    """Leaves no byte on the disk that `path` is on."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def assert_goes_on(folder: Path, *words: str) -> None:
    """There is space again: the run finishes and its ledger is whole."""
    assert train(folder, "--resume", "runs/a", *words) == (0, "")
    assert json.loads((folder / "runs/a/summary.json").read_text())["finished"]
    with Ledger(folder / "runs/a/ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()


def scene(word: str, number: int, num_good: int) -> list:
    return [word, number, num_good, ["train", *QUICK, "--run.steps=2"]]


SCENES = [
    scene("config.json", errno.ENOSPC, 0),
    scene("events.jsonl", errno.EACCES, 0),
    scene("events.jsonl", errno.ENOSPC, 3),
    scene("metrics.jsonl", errno.EDQUOT, 1),
    scene("trace.json", errno.EDQUOT, 3),
    scene("logs/offbeat.log", errno.EROFS, 0),
    scene("logs/rewards.log", errno.EACCES, 0),
    scene("ledger.sqlite", errno.EROFS, 0),
    scene("ledger.sqlite", errno.ENOSPC, 60),
    scene("weights", errno.EROFS, 0),
    scene("weights", errno.EDQUOT, 8),
    scene("checkpoints", errno.EACCES, 0),
    scene("checkpoints", errno.ENOSPC, 3),
    scene("summary.json", errno.ENOSPC, 0),
    scene("/runs", errno.ENOSPC, 40),
]
"""Each kind of file of a run that cannot be written from its n-th write on."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    """What makes the C library's calls fail."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("calls of the C library can be made to fail on Linux, with a compiler")
    built = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    source = Path(__file__).parent / "failing_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.mark.full
def test_whichever_file_cannot_be_written_a_run_ends_with_one_line_and_goes_on_later(tmp_path, shim):
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, SUPPORT / "failing_runs.py"],
        input=json.dumps(SCENES),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "LD_PRELOAD": str(shim)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    for (word, number, _, _), came in zip(SCENES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        shown = f"{word}, {errno.errorcode[number]}: {came}"
        assert (came["status"] in (1, 2), came["errors"].count("\n")) == (True, 1), shown
        named = re.escape(word.strip("/").removeprefix("runs"))
        remedy = r"(free|make|give|see|check) .*(space|writable|right to write|written)"
        assert re.search(rf"^offbeat: .*{named}.*; {remedy}", came["errors"]), shown
        assert (came["again"], came["verified"]) == ([0, ""], 0), shown


@pytest.mark.full
def test_a_role_on_a_full_disk_is_not_started_again_and_the_run_goes_on_later(tmp_path, shim):
    words = (*QUICK, "--run.steps=2", "--rollout.workers=1")
    fails = {"LD_PRELOAD": str(shim), "DISK_FAILS": f"{errno.ENOSPC} 4 checkpoints"}
    status, errors = train(tmp_path, *words, **fails)
    told = r"offbeat: trainer: ended with status 3 and is not restarted: .*cannot write the .*; free space .*\n"
    assert (status, bool(re.fullmatch(told, errors))) == (1, True), errors
    assert train(tmp_path, *words, "--resume") == (0, "")
    for log in (tmp_path / "runs" / "a" / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log


def test_a_version_that_does_not_fit_is_told_and_leaves_nothing_behind(tmp_path):
    store = Publisher(tmp_path / "weights")
    with no_file_over(1000), pytest.raises(WeightsError, match=r"cannot write the weights of step 3 .*free space"):
        store.write(7, 3, None, {"w": torch.zeros(1000)})
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_ledger_that_cannot_grow_says_so_and_is_as_it_was_before(tmp_path):
    version = Version(0, 0, None, "digest", Path("x" * 100_000))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        told = r"ledger\.sqlite: .*; (free space on its disk|check that its disk works and has free space), then resume"
        with no_file_over(50_000), pytest.raises(LedgerError, match=told), ledger.naming_damage():
            ledger.publish(version)
        assert ledger.latest_version() is None
        ledger.publish(version)
        assert ledger.verify().violations == ()
