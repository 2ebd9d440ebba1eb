"""Small runs on a disk that fails where it is told to, one after the other in a process of their own.

Reads scenes as JSON, a list of (word, error number, number of good calls, arguments of the command line). Writes for
each what came of it: status and what was said, the same for a resume on a disk that works, and whether that verifies.
`test_disk_full` starts it with `failing_disk.c` loaded.
"""

import contextlib
import ctypes
import io
import json
import shutil
import sys
import threading
from pathlib import Path

from offbeat.cli.main import main

SHIM = ctypes.CDLL(None)


def said(words: list[str]) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            import traceback

            return -1, "".join(traceback.format_exception(error))
    return status, errors.getvalue()


def play(word: str, number: int, num_good: int, words: list[str]) -> dict:
    shutil.rmtree("runs", ignore_errors=True)
    before = threading.active_count()
    SHIM.disk_fails(word.encode(), number, num_good)
    try:
        status, errors = said(words)
    finally:
        SHIM.disk_fails(b"", 0, 0)
    again = said([*words, "--resume"] if Path("runs/a").is_dir() and "start it again" not in errors else words)
    return {
        "status": status,
        "errors": errors,
        "again": again,
        "verified": said(["ledger", "verify", "runs/a"])[0],
        "threads_left": threading.active_count() - before,
    }


if __name__ == "__main__":
    print(json.dumps([play(*scene) for scene in json.load(sys.stdin)]))
