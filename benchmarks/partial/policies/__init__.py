"""Policies: which samples run, and when a step ends. Each has its own file; all use `benchmarks.partial.rollouts`."""
