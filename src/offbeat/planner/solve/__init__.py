"""The solver: from a planning problem to a solution with a proof of optimality, and a checker that needs no solver."""
