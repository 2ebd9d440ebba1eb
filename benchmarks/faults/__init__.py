"""What hurts a run on purpose, for benchmarks and tests: witnessed kills, and a bad line."""
