"""The planner: from an inventory and a workload to a plan, with a proof of its quality. Imports no torch."""
