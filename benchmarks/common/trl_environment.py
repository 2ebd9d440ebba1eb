"""Virtual environments for systems that Offbeat is compared with, separate from Offbeat's, so that versions do not
conflict.

An environment is made on first use below `.cache/` in the repository and kept as long as its requirements and
constraints stay the same. After an interrupted installation it is made again. TORCH_INDEX names another package index
for torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.report import REPOSITORY
from offbeat.errors import UserError

CONSTRAINTS = REPOSITORY / "constraints.txt"
TRL_REQUIREMENTS = (["torch"], ["trl==1.16.0", "pydantic", "blake3"])
"""Packages, in order of installation: torch comes first, so that later packages keep its version. pydantic and blake3
are for Offbeat's task and reward, on which TRL trains."""
INSTALL_WITHIN_S = 1800.0


def trl_python(given: str | None = None) -> Path:
    """Returns the interpreter of TRL's environment: `given`, that in OFFBEAT_TRL_PYTHON, or our own, made if needed."""
    named = given or os.environ.get("OFFBEAT_TRL_PYTHON")
    if named is None:
        return _ready(REPOSITORY / ".cache" / "trl", TRL_REQUIREMENTS)
    if not Path(named).is_file():
        raise UserError(
            f"--trl-python {named}: no such file; give the python of an environment with {TRL_REQUIREMENTS[1][0]}"
        )
    return Path(named)


def _ready(folder: Path, requirements: tuple[list[str], ...]) -> Path:
    python, stamp = folder / "bin" / "python", folder / ".ready"
    wanted = hashlib.sha256(f"{requirements}{CONSTRAINTS.read_text()}".encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up {folder.relative_to(REPOSITORY)} (a few minutes, once)", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "-c", str(CONSTRAINTS)]
        for packages in requirements:
            index = os.environ.get("TORCH_INDEX") if packages == ["torch"] else None  # as make takes it
            _call([*pip, *(["--index-url", index] if index else []), *packages])
        stamp.write_text(wanted)
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise UserError(f"cannot set up the environment for TRL: {' '.join(command[-3:])}: {said[-1]}")
