"""The solver: finds a plan for a planning problem and proves how good it is. The checker of plans needs no solver."""
