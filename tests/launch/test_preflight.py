"""What a run shows and leaves behind while it is checked."""

import asyncio
from contextlib import contextmanager

from offbeat.config import load
from offbeat.launch import preflight


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
