"""Files that cannot be written are told in one line: which, why, what to do."""

import errno
import os
import re
import subprocess
import sys

import pytest
from faulty_disk import no_file_over

from offbeat.cli import model
from offbeat.cli import worker as worker_command
from offbeat.cli.main import STOPPED, main
from offbeat.errors import DiskError
from offbeat.files import REMEDIES, cannot_write, create_atomic, disk_trouble, naming, write_atomic


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_the_line_names_the_file_the_reason_and_the_remedy(number):
    told = str(cannot_write("runs/a/x.json", OSError(number, os.strerror(number))))
    assert told == f"runs/a/x.json: cannot be written: {os.strerror(number)}; {REMEDIES[number]}, then resume the run"


@pytest.mark.parametrize("write", [write_atomic, create_atomic])
def test_an_error_of_a_write_itself_has_the_name_of_the_file_and_leaves_no_draft(tmp_path, write):
    (tmp_path / "file").write_bytes(b"before") if write is write_atomic else None
    with no_file_over(10), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path / "file", bytes(1000))
    assert caught.value.filename == str(tmp_path / "file")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == (
        [("file", b"before")] if write is write_atomic else []
    )


def test_what_is_no_trouble_of_a_disk_is_left_alone():
    assert disk_trouble(ValueError("a bug")) is None
    assert disk_trouble(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    with pytest.raises(DiskError, match=r"^x: cannot be written"):
        raise disk_trouble(OSError(errno.EROFS, "Read-only file system", "x"))


@pytest.mark.parametrize(
    "command, words, status",
    [(model, ["model", "smollm2", "x"], 1), (worker_command, ["worker", "--join", "http://127.0.0.1:9"], STOPPED)],
)
def test_whatever_write_a_command_fails_at_it_ends_with_one_line(capsys, monkeypatch, command, words, status):
    def run(arguments, overrides):
        with naming("a/file"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(command, "run", run)
    assert main(words) == status
    told = capsys.readouterr().err
    assert re.fullmatch(r"offbeat: a/file: cannot be written: .*quota.*, then try again\n", told), told


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_nobody_can_keep_is_one_line_and_a_status():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "offbeat", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    told = r"offbeat: standard output, .*: cannot be written: No space left on device; free space on its disk, .*\n"
    assert (done.returncode, bool(re.fullmatch(told, done.stderr))) == (1, True), done.stderr
