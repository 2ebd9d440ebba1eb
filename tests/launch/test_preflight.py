"""What a run shows and leaves behind while it is checked."""

import asyncio
from contextlib import contextmanager

from offbeat.config import from_dict, load
from offbeat.launch import preflight


def test_a_run_on_three_rows_is_told_so_before_it_starts(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(3)))
    task = {"source": "file", "path": str(file), "reward": "exact"}

    async def check(**evaluation):
        async with preflight.checking(from_dict({"task": task, "eval": evaluation})) as checked:
            return [advice.about for advice in checked.advice()]

    assert asyncio.run(check()) == ["few rows sums", "few held-out"]
    assert asyncio.run(check(every=0)) == ["few rows sums"]


def test_each_stage_is_named_by_what_takes_its_time(monkeypatch):
    stages = []

    @contextmanager
    def recorded(**options):
        yield stages.append

    async def check():
        async with preflight.checking(load(None)):
            pass

    monkeypatch.setattr(preflight, "loading", recorded)
    asyncio.run(check())
    assert stages == [
        "trying the rewards",
        "importing transformers, which reads the tokenizer",
        "reading the prompts",
    ]
