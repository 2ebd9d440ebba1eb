"""Columns (candidates) of the planning problem: the training gangs and shapes of rollout replicas worth considering."""
