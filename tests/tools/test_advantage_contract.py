"""The contract of advantages holds for every built-in one, and finds each way to break it."""

import numpy as np
import pytest

from offbeat.tools.loss_contract import Mark, check_advantage
from offbeat.trainer.advantages import ADVANTAGES, batch_normalised, group_centred

NUMBERS = "returns one finite number per answer"
ORDER = "the order of answers and the names of groups do not matter"
APART = "groups have no influence on each other"
EQUAL = "where all rewards are equal there is no advantage"
BETTER = "within a group, a better answer never has a lower advantage"


def findings(advantage):
    return {finding.check: finding for finding in check_advantage(advantage)}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_built_in_advantage_keeps_the_contract(name):
    found = findings(ADVANTAGES[name])
    assert len(found) == 5
    warned = {check for check, finding in found.items() if finding.mark is not Mark.HOLDS}
    assert warned == ({APART} if name == "batch" else set())
    assert Mark.FAILS not in {finding.mark for finding in found.values()}


def test_an_advantage_of_the_whole_batch_is_a_warning_that_says_so():
    assert "uses the whole batch" in findings(batch_normalised)[APART].detail


def by_position(rewards, groups):
    """Groups of two neighbours, whatever their ids."""
    pairs = np.arange(len(rewards)) // 2
    return group_centred(rewards, pairs)


def noisy(rewards, groups):
    """Divides rounding errors by each other."""
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = groups == group
        spread = rewards[own].std() or 1.0
        found[own] = (rewards[own] - rewards[own].mean()) / spread
    return found


def sample_std(rewards, groups):
    """A group of one has none."""
    with np.errstate(all="ignore"):
        return np.array(
            [
                (r - rewards[groups == g].mean()) / (rewards[groups == g].std(ddof=1) + 1e-3)
                for r, g in zip(rewards, groups, strict=True)
            ]
        )


WRONG = {
    "one number": (lambda rewards, groups: 0.5, NUMBERS, "of shape ()"),
    "words": (lambda rewards, groups: ["good"] * len(rewards), NUMBERS, "return one number per answer"),
    "an error": (lambda rewards, groups: rewards[100], NUMBERS, "IndexError"),
    "NaN for one": (sample_std, NUMBERS, "1 of 10 advantages are NaN"),
    "groups by position": (by_position, ORDER, "answers come in any order"),
    "ids as numbers": (lambda rewards, groups: group_centred(rewards, groups) * groups, ORDER, "ids are labels"),
    "no baseline": (lambda rewards, groups: rewards, EQUAL, "subtract a mean"),
    "rounding errors": (noisy, EQUAL, "rounding errors"),
    "an overflow": (lambda rewards, groups: np.exp(group_centred(rewards, groups)) - 1, NUMBERS, "rewards around"),
    "alone": (
        lambda rewards, groups: group_centred(rewards, groups) / (len(rewards) > 1),
        NUMBERS,
        "NaN or infinite for a group of one",
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("advantage, check, detail", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_advantage_fails_the_check_that_is_about_it(advantage, check, detail):
    found = findings(advantage)
    assert found[check].mark is Mark.FAILS
    assert detail in found[check].detail


def test_a_wrong_sign_is_a_warning():
    found = findings(lambda rewards, groups: -group_centred(rewards, groups))
    assert {check for check, finding in found.items() if finding.mark is not Mark.HOLDS} == {BETTER}
    assert found[BETTER].mark is Mark.WARNS
