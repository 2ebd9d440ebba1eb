"""Columns of the planning problem: the training gangs and rollout replicas worth considering."""
