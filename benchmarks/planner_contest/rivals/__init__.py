"""Planners to compare with: AReaL-Hex's Algorithm 1 in three readings, and ours behind the same face."""
