"""A reward that asks a judge behind an HTTP API, with retries and a limit on requests at a time.

The API is one of OpenAI's kind: JUDGE_URL (such as http://127.0.0.1:8000/v1), JUDGE_MODEL and, if it wants one,
JUDGE_KEY are read from the environment. In a configuration:

    [[task]]
    reward = "examples/judge.py:reward"

    [reward]
    timeout_s = 120
"""

import asyncio
import os
import random
import re

import aiohttp

MAX_REQUESTS = 16
"""Requests at a time, of each reward process."""
ATTEMPTS = 5
WITHIN_S = 20.0
AGAIN = {408, 429, 500, 502, 503, 504}
"""Statuses after which it is worth asking again."""
QUESTION = """\
Grade the answer to a problem from 0 (useless) to 10 (perfect). Reply with the number alone.

Problem: {prompt}
Right answer: {answer}
Answer: {response}
"""

turns = asyncio.Semaphore(MAX_REQUESTS)


async def reward(prompt: str | list[dict[str, str]], response: str, answer: str | None) -> float:
    """The judge's grade, from 0 to 1. Raises if there is none after all attempts: a failure is not a reward of 0."""
    grade = await ask(QUESTION.format(prompt=prompt, answer=answer, response=response))
    found = re.search(r"\d+(\.\d+)?", grade)
    if found is None:
        raise ValueError(f"the judge gave no grade: {grade[:80]!r}")
    return min(float(found[0]), 10.0) / 10


async def ask(question: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("JUDGE_KEY")) else {}
    body = {
        "model": os.environ.get("JUDGE_MODEL", "judge"),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
    }
    url = f"{os.environ['JUDGE_URL']}/chat/completions"
    async with turns, aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(WITHIN_S)) as session:
        for attempt in range(ATTEMPTS):
            pause_s = random.uniform(0.5, 1.0) * 2**attempt
            try:
                async with session.post(url, json=body) as reply:
                    if reply.status not in AGAIN:
                        reply.raise_for_status()
                        return (await reply.json())["choices"][0]["message"]["content"]
                    pause_s = max(pause_s, float(reply.headers.get("Retry-After", 0)))
            except (aiohttp.ClientConnectionError, TimeoutError):
                pass
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(pause_s)
    raise RuntimeError(f"no answer from {url} in {ATTEMPTS} attempts")
