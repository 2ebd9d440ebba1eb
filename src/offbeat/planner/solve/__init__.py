"""The solver: from a planning problem to counts with a proof of optimality, and a checker without a solver."""
