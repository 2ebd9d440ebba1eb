"""Inputs of the planner: machines, links, prices and the workload, as users describe them."""
