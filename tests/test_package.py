"""The wheel and the sdist: each installs into an environment without the source tree, and the demo trains there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="building a package needs the extra 'dev'")

ROOT = Path(__file__).parents[1]
SMALL = ("--run.steps=2", "--batch.groups-per-step=2", "--eval.every=0", "--run.name=a")


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_built_package_installs_and_trains_without_the_source_tree(kind, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", tmp_path / "dist", cwd=ROOT)
    (package,) = (tmp_path / "dist").iterdir()
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (folder / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # what Offbeat needs, not Offbeat itself
    install = ("install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall", package)
    run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *install, cwd=tmp_path)
    assert run(python, "-c", "import offbeat; print(offbeat.__file__)", cwd=tmp_path).startswith(str(folder))
    run(home / "bin" / "offbeat", "doctor", cwd=tmp_path)  # ends with status 0 where the demo can run
    run(home / "bin" / "offbeat", "train", *SMALL, cwd=tmp_path)
    assert (tmp_path / "runs" / "a" / "summary.json").is_file()
