"""Episodes with tools and environments: what waiting, faults, rounds and turns cost, and whether the demos learn."""
