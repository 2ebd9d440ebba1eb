"""Who runs what, and when a step ends: one file a policy, all on the same floor (`benchmarks.partial.rollouts`)."""
