"""Other systems, each run in an environment of its own."""
