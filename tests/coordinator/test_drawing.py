"""What is drawn, and in which order, does not depend on when it is drawn or on how its answers are claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import from_dict
from offbeat.coordinator.admission import Issuer
from offbeat.launch import wiring
from offbeat.ledger.records import Cursor, DrawCursor, NewGroup

TASKS = [{"source": "arithmetic"}, {"source": "arithmetic", "level": 2, "weight": 2.0}]


def issuer(gate: str) -> Issuer:
    config = from_dict({"task": TASKS, "run": {"seed": 4}, "batch": {"gate": gate, "group_size": 4}})
    return wiring.make_issuer(config, wiring.make_mixture(config, None), wiring.load_tokens(config))


@pytest.fixture(scope="module")
def strict() -> Issuer:
    return issuer("strict")


@pytest.fixture(scope="module")
def released() -> Issuer:
    return issuer("release")


def draw(issuer: Issuer, portions: list[int]) -> list[NewGroup]:
    """Draws so many groups at a time, each time after what the ledger would remember."""
    cursor, found = Cursor(0, {}), []
    for count in portions:
        found += issuer.draw(cursor, count, version=None)[0]
        drawn = dict(cursor.drawn) | {group.source: group.source_ordinal + 1 for group in found}
        last = DrawCursor(found[-1].source, found[-1].source_ordinal, found[-1].sibling) if found else None
        cursor = Cursor(len(found), drawn, last)
    return found


def told(group: NewGroup) -> tuple[object, ...]:
    return group.source, group.source_ordinal, group.problem, group.prompt_tokens.tolist()


def test_prompts_drawn_as_single_answers_are_those_of_whole_groups_in_the_same_order(strict: Issuer, released: Issuer):
    whole, apart = draw(strict, [9]), draw(released, [36])
    assert [told(group) for group in apart] == [told(group) for group in whole for _ in range(4)]
    assert [(group.size, group.sibling) for group in apart] == [(1, sibling) for _ in range(9) for sibling in range(4)]
    assert {(group.size, group.sibling) for group in whole} == {(4, 0)}


def test_every_answer_has_noise_of_its_own(released: Issuer):
    seeds = [group.seed for group in draw(released, [36])]
    assert len(set(seeds)) == len(seeds)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8))
def test_groups_drawn_in_portions_are_those_drawn_at_once(released: Issuer, portions: list[int]):
    def as_rows(groups: list[NewGroup]) -> list[NewGroup]:
        return [replace(group, prompt_tokens=tuple(group.prompt_tokens)) for group in groups]

    assert as_rows(draw(released, portions)) == as_rows(draw(released, [sum(portions)]))
