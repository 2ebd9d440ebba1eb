"""The page shows the very words that a run says, and names keys that there are."""

import re

import pytest
from doc_reader import ROOT, blocks

from offbeat.config.keys import known_keys
from offbeat.observability.advice import Adviser, Keys, few_held_out, few_rows, right_answer_earns, wrong_answer_fails
from offbeat.observability.metrics import ALARMS

PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = {"reward": 0.4, "reward_min": 0.0, "reward_max": 1.0, "samples": 64, "tokens": 80, "num_trained_tokens": 80}
WRONG = {
    "constant reward": {"reward": 0.0, "reward_max": 0.0, "samples": 8},
    "no signal": {"reward": 0.01, "signal_share": 0.02},
    "cut": {"cut_share": 0.88},
    "masked": {"num_trained_tokens": 25},
    "rejected": {"kept_share": 0.4},
    "idle workers": {"workers": 4, "idle_workers": 2},
}


def shape(text: str) -> str:
    """A message without its numbers."""
    return re.sub(r"\d+([.,]\d+)*", "N", text)


def said() -> list[str]:
    """All that an adviser can say."""

    def adviser() -> Adviser:
        return Adviser(Keys(max_new_tokens=64, group_size=8, max_staleness=2, lr=0.5), "runs/NAME")

    trial = right_answer_earns("questions", "42", "questions.jsonl:1", 0.0, 0.0)
    why = "the reward returned None, a NoneType; return a finite number"
    failing = wrong_answer_fails("questions", why)
    assert trial is not None
    assert failing is not None
    rows, held_out = few_rows("questions", 2), few_held_out(1, 64)
    assert rows is not None
    assert held_out is not None
    found = [trial, failing, rows, held_out, *adviser().no_worker(180.0)]
    found += adviser().evaluation({"step": 10, "eval_samples": 23, "eval_failed": 37})
    for about, figures in WRONG.items():
        watching = adviser()
        own = [advice for _ in range(10) for advice in watching.step({**ROW, **figures})]
        assert about in [advice.about for advice in own]
        found += own
    watching = adviser()
    rows = [{**ROW, "entropy": 0.55}] * 3 + [{**ROW, "entropy": 0.004}] * 10
    found += [advice for row in rows for advice in watching.step(row)]
    watching = adviser()
    rows = [{**ROW, "samples": 64, "reward": 0.84}] + [{**ROW, "samples": 64, "reward": 0.0}] * 3
    found += [advice for row in rows for advice in watching.step(row)]
    return [advice.text for advice in found]


def test_every_advice_is_on_the_page_word_for_word():
    on_page = {shape(block.strip().removeprefix("warning: ")) for block in blocks(PAGE, "")}
    alarm = ALARMS["logprob_gap"].format(step=7, gap=0.5, limit=0.05)
    missing = {shape(text) for text in [*said(), alarm]} - on_page
    assert not missing
    assert {text for text in on_page if not text.startswith("offbeat: ")} == {shape(t) for t in [*said(), alarm]}


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)(?: = [^`]*)?`", PAGE.read_text()))))
def test_every_key_on_the_page_exists(named: str):
    files = ("metrics.jsonl", "events.jsonl", "rewards.log", "response.strip")
    assert named in files or named in {re.sub(r"\.\d+\.", ".", key) for key in known_keys()}
