"""Reward for GSM8K: compares the final number of a response with the one after "####" in the data set's answer."""

from __future__ import annotations

import re

MARK = "####"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward(response: str, answer: str) -> float:
    """1 for the right number after the last "####". Without the mark, half of that for a right last number, so that a
    model that has yet to learn the format gets a signal, too."""
    is_marked = MARK in response
    said = NUMBER.findall(response.rpartition(MARK)[2])
    if not said:
        return 0.0
    final = said[0] if is_marked else said[-1]
    is_right = value(final) == value(NUMBER.findall(answer.rpartition(MARK)[2])[0])
    return is_right * (1.0 if is_marked else 0.5)


def value(number: str) -> float:
    return float(number.replace(",", ""))
