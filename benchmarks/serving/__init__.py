"""Servers of engines to measure: their models, what is asked of them and by whom, and changes of their weights."""
