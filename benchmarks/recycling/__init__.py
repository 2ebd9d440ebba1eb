"""Parts of `benchmarks.partial_learning`: whole runs that recycle unfinished answers, or wait for all of them."""
