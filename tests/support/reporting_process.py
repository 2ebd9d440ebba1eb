"""A process that tells about itself, or ends in one way or another: `reporting_process.py WHAT WORDS…`."""

import json
import os
import signal
import sys
from pathlib import Path


def tell() -> None:
    from_proc = Path("/proc/self/environ").read_bytes().rstrip(b"\0").split(b"\0")
    facts = {
        "has_torch": "torch" in sys.modules,
        "offbeat": [name for name in sys.modules if name.startswith("offbeat")],
        "words": sys.argv[1:],
        "shown_words": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "shown_environment": sorted(os.fsdecode(entry) for entry in from_proc),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "paths": sys.path,
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd") if is_open(int(name))),
        "parent": os.getppid(),
        "leads_session": os.getsid(0) == os.getpid(),
        "interrupts": str(signal.getsignal(signal.SIGINT)),
        "name": __name__,
    }
    print(json.dumps(facts))


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def main(what: str, *words: str) -> None:
    if what == "look":
        return tell()
    print("begun", flush=True)
    match what:
        case "exit":
            sys.exit(int(words[0]) if words[0].isdigit() else words[0])
        case "raise":
            raise ValueError("no hen")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            signal.pause()
        case "come-by":
            from offbeat.testing.crash_points import crash_here

            crash_here("generated")
        case "leave-late":
            import atexit
            import threading
            import time

            def last() -> None:
                time.sleep(0.2)
                print("a thread", file=sys.stderr)

            atexit.register(lambda: print("an exit function", file=sys.stderr))
            threading.Thread(target=last).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
