"""Slow lines on one machine, without privileges."""
