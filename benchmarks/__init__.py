"""Benchmarks, each with targets that it should reach: `python -m benchmarks.NAME [--quick]`."""

import os

from offbeat.cli.main import spin_briefly

os.environ.setdefault("OFFBEAT_TESTING", "1")  # some use the paced engine, also in processes that they start
spin_briefly()  # as the command line does; rivals in the same process get it too
