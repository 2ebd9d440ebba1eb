"""Columns of the planning problem: all possible training gangs and rollout replicas."""
