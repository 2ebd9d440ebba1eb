"""Parts of `benchmarks.staleness`: lessons whose data is held back."""
