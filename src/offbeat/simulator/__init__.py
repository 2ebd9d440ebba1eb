"""A simulator of runs: discrete events around the very rules that decide in a real run."""
