"""The contestants: AReaL-Hex's Algorithm 1 in three readings, and our planner, behind the same interface."""
