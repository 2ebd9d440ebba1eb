"""Starts Offbeat's processes in tests as copies of one that has imported torch and its like already.

Importing them takes seconds, and tests start hundreds of processes. `install()` has `subprocess` and asyncio ask a
zygote for most commands of `python -m offbeat`, for `python -m benchmarks.…` and for scripts among the tests; whatever
else they start is started as ever. The zygote is a process that has imported the packages that Offbeat uses, nothing of
Offbeat itself, and that has one thread.

A copy behaves as the command that it stands for. It is a child of the process that asked, with the arguments, the
environment, the working folder, the session, the files and the numbers of files that were asked for; `/proc` shows its
words and its environment; it imports Offbeat itself, after all that. It differs from a process that was really started
in this: the packages are there, the seed of hashes is the zygote's, numpy's linear algebra has one thread, a command
that starts others has a zygote of its own, and at the end threads, exit functions and streams are seen to, but modules
are not taken apart.

Really started nevertheless: a process whose environment holds a setting that an interpreter or a package reads when it
starts (`PYTHONHASHSEED`, `OMP_WAIT_POLICY`, …), one with a `preexec_fn`, all within `no_zygote()`, all where a zygote
could not be had, and all with `OFFBEAT_TEST_ZYGOTE=0`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SWITCH = "OFFBEAT_TEST_ZYGOTE"
TESTS = Path(__file__).parent
PACKAGES = (
    *("torch", "transformers", "numpy", "scipy.optimize", "scipy.stats", "networkx", "pydantic", "msgspec", "jinja2"),
    *(
        "aiohttp",
        "starlette.applications",
        "uvicorn",
        "httptools",
        "uvicorn.protocols.http.httptools_impl",
        "uvicorn.lifespan.on",
    ),
    *("safetensors.torch", "tokenizers", "blake3", "zstandard", "cloudpickle", "rich.console", "rich.live"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "transformers.models.llama.modeling_llama"),
    *("torch._dynamo", "torch.optim", "torch.nn.utils.stateless", "concurrent.futures.thread", "runpy", "sqlite3"),
)
"""What costs time to import; one that is missing is left to whoever needs it."""
READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH"),
    *("CUDA", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)
"""How the names of settings begin that somebody reads while starting."""
APPLIED_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")
"""Settings that a copy can still heed."""
COMMANDS = ("train", "serve", "trainer", "worker", "eval", "export", "ledger", "show", "replay", "check-loss")
"""Commands of Offbeat that import much; the doctor has to look at a machine as it is."""
ROOM = 100_000
"""Bytes that `/proc` can show of a copy's words, and as many of its environment."""
SET_BY_PACKAGES = ("TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
"""Settings that torch and Offbeat put into the environment of the tests themselves."""
SPIN_COUNT = "1000"
"""That of `offbeat.cli.main`, of which the zygote knows nothing."""
PR_SET_CHILD_SUBREAPER = 36

_AT_IMPORT = dict(os.environb)
"""What a zygote has read: of tests before any of them runs, of a zygote itself when it was started."""
_libc = ctypes.CDLL(None, use_errno=True)
_started_for_real = subprocess._fork_exec  # type: ignore[attr-defined]


@dataclass
class Job:
    """A process that was asked for."""

    words: list[str]
    """Those after the interpreter."""
    environment: dict[bytes, bytes]
    folder: str
    places: list[int]
    """The numbers that its files are to have."""
    new_session: bool
    group: int
    """A process group to join; -1 stays in the parent's."""

    @property
    def module(self) -> str | None:
        return self.words[1] if self.words[0] == "-m" else None

    @property
    def starts_others(self) -> bool:
        """Whether it may start commands of Offbeat itself."""
        return self.module is not None and (self.module != "offbeat" or self.words[2:3] == ["train"])


class Zygote:
    """A zygote of this process, which must be its parent, seen from here."""

    def __init__(self, link: socket.socket):
        self._link, self._lock = link, threading.Lock()
        atexit.register(link.close)

    def ask(self, job: Job, files: Sequence[int]) -> int:
        """Has a process started with these files and returns its number; it is a child of this process."""
        data = pickle.dumps(vars(job))
        with self._lock, _adopting():
            socket.send_fds(self._link, [struct.pack("!q", len(data))], list(files))
            self._link.sendall(data)
            (pid,) = struct.unpack("!q", _read(self._link, 8))
        return pid


def start_zygote() -> Zygote:
    """Starts one from nothing; it ends with this process."""
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in _AT_IMPORT.items() if os.fsdecode(name) not in APPLIED_LATER}
    with theirs, no_zygote():
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), "x" * ROOM],
            env={**environment, b"ROOM": b"x" * ROOM},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        ).returncode = 0  # nobody waits for it, and nobody needs to be warned of that
    return Zygote(ours)


_zygote: Zygote | None = None
_has_failed = False
"""Whether a zygote could not be had on this machine; then every process is really started."""
_is_off = threading.local()
_starting = threading.Lock()


def install(zygote: Zygote | None = None) -> None:
    """From now on this process asks a zygote for whatever it can; without one, one is started when it is needed."""
    global _zygote
    if sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0":
        _zygote = zygote
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


@contextmanager
def no_zygote() -> Iterator[None]:
    """Within it, this thread starts every process for real."""
    before = getattr(_is_off, "value", False)
    _is_off.value = True
    try:
        yield
    finally:
        _is_off.value = before


def _fork_exec(*given: Any) -> int:
    """In place of the function of this name in `subprocess`, which tells all about a process to start in this order."""
    global _zygote, _has_failed
    words, _, close_fds, pass_fds, folder, environment = given[:6]
    stdin, _, _, stdout, _, stderr, _, errors = given[6:14]
    _, new_session, group, *identity = given[14:-2]
    if (
        getattr(_is_off, "value", False)
        or _has_failed
        or not close_fds
        or given[-2] is not None  # preexec_fn
        or any(part not in (None, -1) for part in identity)  # another user, groups or umask
        or not _is_ours([os.fsdecode(word) for word in words])
        or not _suits(own := _environment(environment))
        or not os.path.isdir(folder or ".")
    ):
        return _started_for_real(*given)
    with _starting:
        _zygote = _zygote or start_zygote()
    files = {place: place if file == -1 else file for place, file in enumerate((stdin, stdout, stderr))}
    files |= {file: file for file in pass_fds if file != errors}
    cwd = os.path.join(os.getcwd(), os.fsdecode(folder or "."))
    job = Job([os.fsdecode(word) for word in words[1:]], own, cwd, list(files), bool(new_session), group)
    try:
        return _zygote.ask(job, list(files.values()))
    except (OSError, EOFError):  # it has said why: with another build of torch, say, it may have threads
        _has_failed = True
        return _started_for_real(*given)


def _is_ours(words: list[str]) -> bool:
    if words[0] != sys.executable or len(words) < 2:
        return False
    if words[1] == "-m":
        _, _, module, *rest = words
        return module.startswith("benchmarks.") or (module == "offbeat" and rest != [] and rest[0] in COMMANDS)
    return words[1].endswith(".py") and TESTS in Path(words[1]).parents


def _environment(given: Sequence[bytes] | None) -> dict[bytes, bytes]:
    if given is None:
        return dict(os.environb)
    return dict(entry.split(b"=", 1) for entry in given)


def _suits(environment: dict[bytes, bytes]) -> bool:
    """Whether the zygote has read the same settings."""
    return _read_at_start(environment) == _read_at_start(_AT_IMPORT)


def _read_at_start(environment: dict[bytes, bytes]) -> dict[bytes, bytes]:
    found = {name: value for name, value in environment.items() if os.fsdecode(name).startswith(READ_AT_START)}
    for name in (*APPLIED_LATER, *SET_BY_PACKAGES):
        found.pop(os.fsencode(name), None)
    return {b"GOMP_SPINCOUNT": SPIN_COUNT.encode(), **found}  # what a command settles for itself


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it, descendants whose parent ends become children of this process."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := link.recv(size - len(data))):
            raise EOFError
        data += more
    return data


# ---- In the zygote and in its copies

_on_interrupt: Any = signal.default_int_handler
"""What the zygote found; a process that was started in the background ignores interrupts, and so do its children."""


def serve(link: socket.socket) -> tuple[Job, list[int], int]:
    """Makes copies for whoever is at the other end, until that ends. Returns in every copy: its job, its files, and a
    pipe to tell its number by.

    Each is a copy's copy: as the one between ends at once, the process that asked, which adopts, becomes the parent."""
    while True:
        try:
            head, files, _, _ = socket.recv_fds(link, 8, 253)
            (size,) = struct.unpack("!q", head + _read(link, 8 - len(head)) if head else b"")
            job = Job(**pickle.loads(_read(link, size)))
        except (EOFError, struct.error, OSError):
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            link.close()
            os.close(read)
            return job, files, write
        for file in (write, *files):
            os.close(file)
        told = os.read(read, 8)
        os.close(read)
        os.waitpid(between, 0)
        link.sendall(told)


def become(job: Job, files: list[int], tell: int) -> None:
    """Makes this copy the process that was asked for, up to its first line of Python."""
    own = _own_zygote(files) if job.starts_others else None
    if job.new_session:
        os.setsid()
    elif job.group >= 0:
        os.setpgid(0, job.group)
    above = max(job.places) + 1
    tell = fcntl.fcntl(tell, fcntl.F_DUPFD_CLOEXEC, above)
    kept = [tell]
    if own is not None:
        kept.append(fcntl.fcntl(own.fileno(), fcntl.F_DUPFD_CLOEXEC, above))
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file, place in zip(files, job.places, strict=True):
        os.dup2(file, place, inheritable=True)
    _close_all_but({*job.places, *kept})
    os.chdir(job.folder)
    os.environb.clear()
    os.environb.update(job.environment)
    _show(job)
    _set_up_interpreter(job)
    if own is not None:
        own.detach()
        install(Zygote(socket.socket(fileno=kept[1])))
    signal.signal(signal.SIGINT, _on_interrupt)
    os.write(tell, struct.pack("!q", os.getpid()))
    os.close(tell)


def _own_zygote(files: list[int]) -> socket.socket:
    """A zygote whose parent is this copy; returns the link to it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _close_all_but({0, 1, 2, theirs.fileno()})
        for place in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), place)
        become_and_run(*serve(theirs))
    theirs.close()
    return ours


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the listing's own
                continue


def _show(job: Job) -> None:
    """Writes the words and the environment where the kernel reads them for `/proc`; libc has copies by now."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    words = [os.fsencode(word) for word in (sys.executable, *job.words)]
    entries = [name + b"=" + value for name, value in job.environment.items()]
    for parts, (start, end) in zip((words, entries), (fields[45:47], fields[47:49]), strict=True):
        size = int(end) - int(start)
        block = b"".join(part + b"\0" for part in parts)[: size - 1].ljust(size, b"\0")
        ctypes.memmove(int(start), block, size)


def _set_up_interpreter(job: Job) -> None:
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    sys.modules["numpy"].random.seed()
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = job.folder if job.module else os.path.dirname(os.path.abspath(job.words[0]))
    sys.path[:] = [os.path.realpath(first), *paths, *sys.path]
    sys.argv[:] = job.words[1:] if job.module else job.words
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    importlib.invalidate_caches()


def become_and_run(job: Job, files: list[int], tell: int) -> NoReturn:
    """Ends as an interpreter ends, but for taking its modules apart: with all of these that takes half a second."""
    try:
        become(job, files, tell)
        if job.module:
            runpy.run_module(job.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job.words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or 120
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    global _on_interrupt
    _on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the commands
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads as it is imported
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as `offbeat.cli.main` does before torch is imported
    del sys.path[0]  # the folder of this script, which no command has there
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError:
            continue
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise SystemExit(f"zygote: {num_threads} threads after the imports; a copy would have one of them only")
    gc.collect()
    gc.freeze()  # so that copies share its memory for long
    become_and_run(*serve(link))


if __name__ == "__main__":
    main()
