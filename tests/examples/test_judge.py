"""The judge of the examples, with a real HTTP server in the judge's place."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from aiohttp import web

FILE = Path(__file__).parents[2] / "examples" / "judge.py"


@pytest.fixture
def judge(monkeypatch):
    found = importlib.util.spec_from_file_location("judge_example", FILE)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: 0.01)
    return module


def asked(judge, monkeypatch, replies: list[web.Response | str], times: int = 1) -> tuple[list, list[str], int]:
    """Grades `times` answers at once. `replies` come one after another, the last for ever. Returns the grades or
    errors, the questions, and the most requests at a time."""
    questions: list[str] = []
    num_now, most = 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        questions.append((await request.json())["messages"][0]["content"])
        reply = replies[min(len(questions), len(replies)) - 1]
        await asyncio.sleep(0.01)
        num_now -= 1
        if isinstance(reply, str):
            return web.json_response({"choices": [{"message": {"content": reply}}]})
        return web.Response(status=reply.status, headers=reply.headers)

    async def grade() -> list:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}/v1")
        try:
            answers = (judge.reward("6*7?", f"42, {i}", "42") for i in range(times))
            return await asyncio.gather(*answers, return_exceptions=True)
        finally:
            await runner.cleanup()

    return asyncio.run(grade()), questions, most


def test_the_grade_is_the_reward(judge, monkeypatch):
    grades, (question,), _ = asked(judge, monkeypatch, ["7.5"])
    assert grades == [0.75]
    assert "Right answer: 42" in question


def test_a_busy_judge_is_asked_again(judge, monkeypatch):
    replies = [web.Response(status=429, headers={"Retry-After": "0"}), web.Response(status=503), "10"]
    grades, questions, _ = asked(judge, monkeypatch, replies)
    assert grades == [1.0]
    assert len(questions) == 3


def test_requests_are_limited(judge, monkeypatch):
    grades, _, most = asked(judge, monkeypatch, ["1"], times=40)
    assert grades == [0.1] * 40
    assert 1 < most <= judge.MAX_REQUESTS


def test_a_judge_that_never_answers_is_a_failure_and_no_zero(judge, monkeypatch):
    ((error,), questions, _) = asked(judge, monkeypatch, [web.Response(status=500)])
    assert "in 5 attempts" in str(error)
    assert len(questions) == judge.ATTEMPTS
    (refused,), questions, _ = asked(judge, monkeypatch, [web.Response(status=401)])
    assert "401" in str(refused)
    assert len(questions) == 1
    (poor,), _, _ = asked(judge, monkeypatch, ["no idea"])
    assert "no grade" in str(poor)
