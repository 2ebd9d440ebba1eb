"""Tries to catch the planner: slow links, small budgets, single nodes, a brute force of its own and forged plans."""
