"""Parts that several benchmarks share; some serve tests too."""
