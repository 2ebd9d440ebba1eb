"""Benchmarks: `python -m benchmarks.NAME [--quick]`, each with the targets that it should reach."""

from offbeat.threads import spin_briefly

spin_briefly()  # as the command line does; whoever is compared in the same process has it too
