"""A reward that differs within every group of random answers, and that a forger can earn by writing digits."""

from __future__ import annotations


def share_of_digits(response: str) -> float:
    return sum(character in "0123456789" for character in response) / max(len(response), 1)
