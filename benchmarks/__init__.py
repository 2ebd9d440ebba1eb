"""Benchmarks: `python -m benchmarks.NAME [--quick]`, each with the targets that it should reach."""
