"""Runs the command `offbeat` for `python -m offbeat`."""

import sys

from offbeat.cli.main import main

sys.exit(main())
