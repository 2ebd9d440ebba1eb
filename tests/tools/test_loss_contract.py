"""The contract of losses holds for every built-in one, and finds each way to break it."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offbeat.tools.loss_contract import Mark, check_loss, kind_of
from offbeat.trainer.losses import POLICY_LOSSES, LossSettings, TokenLoss

NUMBERS = "returns one finite number per token"
GRADIENT = "its gradient reaches the log-probs and is finite"
APART = "sequences have no influence on each other"
MASKED = "tokens that are not trained on have no influence"
EXTREMES = "far log-ratios and large advantages stay finite"
SCALE = "its gradient is proportional to the advantages"
DIRECTION = "fresh tokens of better answers become likelier, of worse ones less likely"


def plain(tokens):
    return -tokens.log_ratio.exp() * tokens.advantages


def findings(loss, settings=None):
    return {finding.check: finding for finding in check_loss(loss, settings)}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("settings", [LossSettings(), LossSettings(dual_clip=3.0), LossSettings(3e-4, 4e-4)])
def test_every_built_in_loss_keeps_the_contract(name, settings):
    found = findings(POLICY_LOSSES[name], settings)
    assert len(found) == 7
    assert {finding.mark for finding in found.values()} == {Mark.HOLDS}


def test_the_example_keeps_it_too():
    file = Path(__file__).parents[2] / "examples" / "own_loss.py"
    spec = importlib.util.spec_from_file_location("own_loss", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = findings(module.loss)
    assert {finding.mark for finding in found.values()} == {Mark.HOLDS}


def centred(tokens, settings):
    """A baseline of the micro-batch's own."""
    return plain(tokens) - plain(tokens).mean()


def by_number(tokens, settings):
    return plain(tokens) * (1 + tokens.sequence)


def counting_masked(tokens, settings):
    """The mean over all of a sequence's tokens, trained or not."""
    lengths = torch.zeros(tokens.num_sequences).index_add(0, tokens.sequence, torch.ones(len(tokens.mask)))
    return plain(tokens) / tokens.per_token(lengths)


def by_masked_age(tokens, settings):
    oldest = torch.zeros(tokens.num_sequences).index_add(0, tokens.sequence, tokens.staleness.float())
    return plain(tokens) / (1 + tokens.per_token(oldest))


def by_oldest(tokens, settings):
    """Whether a token is old is asked of masked ones, too, where an age means nothing."""
    return plain(tokens) * (2 if int(tokens.staleness.max()) > 100 else 1)


def hidden(tokens, settings):
    """Adds 0, whose gradient is that of the micro-batch's mean."""
    mean = tokens.logprobs.mean()
    return plain(tokens) + mean - mean.detach()


def dividing_by_trained(tokens, settings):
    """0 / 0 where nothing of a sequence is trained on, which the mask does not undo."""
    trained = torch.zeros(tokens.num_sequences).index_add(0, tokens.sequence, tokens.mask.float())
    return plain(tokens) * trained.min() / trained.min()


def rooted(tokens, settings):
    """The value is fine, the slope of a root at 0 is not."""
    return plain(tokens) + (tokens.log_ratio - tokens.log_ratio).sqrt()


WRONG = {
    "a number": (lambda tokens, settings: 1.0, {NUMBERS}, "returned float"),
    "a mean": (lambda tokens, settings: plain(tokens).mean(), {NUMBERS}, "it returned loss of shape ()"),
    "whole numbers": (lambda tokens, settings: plain(tokens).long(), {NUMBERS}, "returned torch.int64"),
    "NaN": (lambda tokens, settings: (plain(tokens) - 100).sqrt(), {NUMBERS}, "are NaN or infinite"),
    "an error": (lambda tokens, settings: plain(tokens)[10**6], {NUMBERS}, "IndexError"),
    "wrong clipped": (
        lambda tokens, settings: TokenLoss(plain(tokens), torch.zeros(1, dtype=torch.bool)),
        {NUMBERS},
        "returned clipped of shape (1,)",
    ),
    "no gradient": (lambda tokens, settings: plain(tokens).detach(), {GRADIENT}, "without detach()"),
    "a zero gradient": (lambda tokens, settings: 0 * plain(tokens), {GRADIENT}, "0 at every token"),
    "an infinite slope": (rooted, {GRADIENT, EXTREMES}, "a root or logarithm at 0"),
    "a mean of the micro-batch": (centred, {APART}, "batch.tokens_per_microbatch"),
    "numbered sequences": (by_number, {APART}, "batch.tokens_per_microbatch"),
    "a mean over masked tokens": (counting_masked, {MASKED}, "multiply by tokens.mask"),
    "the age of masked tokens": (by_masked_age, {MASKED}, "multiply by tokens.mask"),
    "an age that means nothing": (by_oldest, {MASKED}, "with another staleness of untrained tokens"),
    "a gradient of the micro-batch": (hidden, {APART}, "a gradient is"),
    "0 / 0": (dividing_by_trained, {NUMBERS}, "are NaN or infinite"),
    "an unbounded exponent": (
        lambda tokens, settings: -(tokens.logprobs - tokens.behaviour).exp() * tokens.advantages,
        {EXTREMES},
        "tokens.log_ratio and tokens.log_importance are bounded",
    ),
}


@pytest.mark.parametrize("loss, broken, detail", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_loss_fails_the_check_that_is_about_it(loss, broken, detail):
    found = findings(loss)
    failed = {check for check, finding in found.items() if finding.mark is Mark.FAILS}
    assert broken <= failed
    assert not (failed - broken) - {APART, MASKED}
    assert any(detail in found[check].detail for check in broken), found


def test_what_returns_nothing_useful_is_not_tried_further():
    assert list(findings(lambda tokens, settings: 1.0)) == [NUMBERS]


def test_a_loss_that_fails_on_an_empty_answer_is_found():
    found = findings(lambda tokens, settings: plain(tokens) + 0 * tokens.logprobs.max())
    assert found[MASKED].mark is Mark.FAILS
    assert "max()" in found[MASKED].detail


def test_nan_where_nothing_is_trained_on_is_found():
    assert findings(lambda tokens, settings: plain(tokens) / tokens.mask.any())[MASKED].mark is Mark.FAILS


def test_a_regulariser_is_a_warning():
    found = findings(lambda tokens, settings: plain(tokens) + 0.1 * tokens.logprobs.square())
    assert found[SCALE].mark is Mark.WARNS
    assert Mark.FAILS not in {finding.mark for finding in found.values()}


def test_a_wrong_sign_is_a_warning():
    found = findings(lambda tokens, settings: -plain(tokens))
    assert found[DIRECTION].mark is Mark.WARNS
    assert "22 of 22 tokens" in found[DIRECTION].detail


def test_a_loss_may_use_the_reference():
    found = findings(lambda tokens, settings: plain(tokens) + (tokens.logprobs - tokens.reference).square())
    assert found[NUMBERS].mark is Mark.HOLDS


def test_a_token_loss_and_a_bare_tensor_are_judged_alike():
    bare = findings(lambda tokens, settings: POLICY_LOSSES["clip"](tokens, replace(settings)).loss)
    assert bare == findings(POLICY_LOSSES["clip"])


def test_a_function_is_told_for_what_it_is_by_its_parameters():
    assert kind_of(POLICY_LOSSES["clip"], "x:y") == "loss"
    assert kind_of(lambda rewards, groups: rewards, "x:y") == "advantage"
    with pytest.raises(ValueError, match="x:y: takes a, b; a loss takes tokens and settings, an advantage rewards"):
        kind_of(lambda a, b: a, "x:y")
