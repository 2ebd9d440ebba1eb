"""Schedules of rollouts with a long tail of lengths, compared on one engine: see `benchmarks.partial`."""
