"""Every causal language model of transformers, tiny and random, beside its own code (see `__main__`)."""
