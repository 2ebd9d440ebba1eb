"""The two sides of the swarm benchmark: a coordinator in a process of its own, and a crowd of workers."""
