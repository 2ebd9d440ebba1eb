"""What is drawn, and in which order, does not depend on when it is drawn or on how its answers are claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import from_dict
from offbeat.coordinator.admission import Issuer, LeftOut
from offbeat.errors import RunStopped, UserError
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


def draw(issuer: Issuer, portions: list[int], left_out: list[LeftOut] | None = None) -> list[NewGroup]:
    """Draws so many groups at a time, each time after what the ledger would remember. Prompts that are passed over are
    added to `left_out`."""
    cursor, found = Cursor(0, {}), []
    for count in portions:
        groups, passed_over = issuer.draw(cursor, count, version=None)
        found += groups
        if left_out is not None:
            left_out += passed_over
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


def test_prompts_that_are_too_long_are_passed_over_and_the_others_keep_their_order(tmp_path: Path):
    lines = [f'{{"prompt": "{"1+" * (40 if n % 3 == 1 else 1)}{n}="}}\n' for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    task = {"source": "file", "path": str(tmp_path / "rows.jsonl"), "reward": "exact", "held_out": 0}
    config = from_dict({"task": [task, {"source": "arithmetic", "weight": 2.0}], "rollout": {"max_prompt_tokens": 20}})
    made = wiring.make_issuer(config, wiring.make_mixture(config, None), wiring.load_tokens(config))
    roomy = wiring.make_issuer(
        from_dict({"task": [task], "rollout": {"max_prompt_tokens": 99}}),
        wiring.make_mixture(from_dict({"task": [task]}), None),
        wiring.load_tokens(config),
    )
    apart: list[LeftOut] = []
    left_out: list[LeftOut] = []
    at_once = draw(made, [40], left_out)
    assert [told(group) for group in draw(made, [1] * 40, apart)] == [told(group) for group in at_once]
    assert apart == left_out  # each once
    own = [group.problem["prompt"] for group in at_once if group.source == "rows"]
    wanted = [group.problem["prompt"] for group in draw(roomy, [36]) if len(group.prompt_tokens) <= 20]
    assert own == wanted[: len(own)]
    num_passed = max(group.source_ordinal for group in at_once if group.source == "rows") + 1 - len(own)
    assert (len(left_out), {one.source for one in left_out}) == (num_passed, {"rows"})
    assert all("over rollout.max_prompt_tokens = 20" in one.why for one in left_out)


def test_a_source_of_which_nothing_can_be_used_stops_the_run():
    config = from_dict({"rollout": {"max_prompt_tokens": 2}})
    made = wiring.make_issuer(config, wiring.make_mixture(config, None), wiring.load_tokens(config))
    with pytest.raises(RunStopped, match=r"^1000 prompts in a row cannot be used; the last: arithmetic, problem 999: "):
        made.draw(Cursor(0, {}), 1, None)


def test_held_out_prompts_that_are_too_long_are_refused_or_left_out_and_the_others_keep_their_seeds():
    def held_out(policy: str, limit: int) -> list[NewGroup]:
        config = from_dict({"eval": {"prompts": 30}, "rollout": {"max_prompt_tokens": limit, "long_prompts": policy}})
        return wiring.make_issuer(config, wiring.make_mixture(config, None), wiring.load_tokens(config)).held_out(0)

    some, all_of_them = held_out("skip", 6), held_out("error", 64)
    seeds = {group.ordinal: group.seed for group in all_of_them}
    assert 0 < len(some) < len(all_of_them) == 30
    assert all(seeds[group.ordinal] == group.seed for group in some)
    with pytest.raises(UserError, match=r'raise this limit, or set rollout\.long_prompts = "skip" or "cut"$'):
        held_out("error", 6)
