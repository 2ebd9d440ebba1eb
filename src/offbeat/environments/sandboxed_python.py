"""The interpreter inside a sandbox: runs the code that the model writes, and answers what came of it.

    sandboxed_python ANSWERS MEMORY_MB TMP_BYTES PROCESSES CHARS

It runs as a file by itself and imports only the standard library. Code comes on standard input, one JSON text a line;
each is answered by a line of JSON in the descriptor ANSWERS. What the code prints goes to the standard output. Limits
are set here, behind all that needs rights, and cannot be raised again. Nothing that this process says is trusted: the
code can do with it what it likes, and harms only the answers that its own model is given.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any


def serve(answers: int, memory_mb: int, tmp_bytes: int, num_processes: int, max_chars: int) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_NPROC: num_processes,
        resource.RLIMIT_FSIZE: tmp_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    os.set_inheritable(answers, False)
    incoming = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    own, kill, wait, write = os.getpid(), os.kill, os.waitpid, os.write
    write(answers, b'{"ready": true}\n')
    for line in incoming:
        result = run(json.loads(line), namespace)
        if os.getpid() != own:  # the code has forked, and this is the copy
            os._exit(0)
        with contextlib.suppress(ValueError, OSError, AttributeError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            kill(-1, signal.SIGKILL)  # all that the code has left behind
            while wait(-1, 0):
                pass
        write(answers, json.dumps({"result": result[-max_chars:]}).encode() + b"\n")


def run(code: str, namespace: dict[str, Any]) -> str:
    """Runs code; returns the value of its last line, if it is an expression, or the error."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
            return "" if value is None else repr(value)
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"SystemExit: {error.code}"
    except BaseException as error:  # noqa: BLE001 - whatever the model's code raises is told to the model
        return _shown(error)
    return ""


def _shown(error: BaseException) -> str:
    """Returns an error as the interpreter prints it, without the lines of this file."""
    found = traceback.TracebackException.from_exception(error)
    while found.stack and found.stack[0].filename != "<code>":
        del found.stack[0]
    written = io.StringIO()
    with contextlib.suppress(Exception):
        found.print(file=written)
    return written.getvalue() or type(error).__name__


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
