"""Placement: which nodes train and which generate, the cards of each group, and the paths of the weights."""
