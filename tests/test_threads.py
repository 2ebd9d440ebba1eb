"""How torch's threads wait is settled before torch reads it, and the user has the last word."""

from __future__ import annotations

import os
import subprocess
import sys


def settings(**environment: str) -> str:
    """What the command line leaves in its environment."""
    code = (
        "import os; from offbeat.cli.main import main; main(['--help']); "
        "print([os.environ.get(k) for k in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')])"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, check=True)
    return done.stdout.decode().splitlines()[-1]


def test_threads_spin_briefly_unless_the_user_has_chosen():
    assert settings() == "['1000', None]"
    assert settings(GOMP_SPINCOUNT="7") == "['7', None]"
    assert settings(OMP_WAIT_POLICY="ACTIVE") == "[None, 'ACTIVE']"
