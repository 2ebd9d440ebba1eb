"""docs/models.md says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.architectures import page
from benchmarks.architectures.compare import Result, Verdict

ROOT = Path(__file__).parents[2]
RAW = json.loads((ROOT / "benchmarks" / "results" / "architectures.json").read_text())
RESULTS = [
    Result(**{**one, **{part: one[part] and Verdict(**one[part]) for part in ("trainer", "engine")}})
    for one in RAW["results"]
]


def test_the_page_is_written_from_the_results():
    assert (ROOT / "docs" / "models.md").read_text() == page.written(RESULTS, RAW["transformers"])


def test_at_least_120_architectures_were_tried_and_none_of_them_is_wrong():
    assert len(RESULTS) >= 120
    assert {status for result in RESULTS for status in result.statuses} <= {"agrees", "refused"}
    built = [result for result in RESULTS if result.error is None]
    assert sum("refused" in result.statuses for result in built) <= 0.3 * len(built)


def test_the_readme_tells_how_many_can_be_used_throughout():
    used = sum(result.statuses == {"agrees"} for result in RESULTS)
    assert f"{used} architectures" in (ROOT / "README.md").read_text()
