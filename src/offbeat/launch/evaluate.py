"""Judges a model on the held-out split, without a run: `offbeat eval`."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from offbeat.config.models import Config
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.ledger.records import EvalGroup, EvalRound, GroupState, NewGroup, derive_seed
from offbeat.reward.pool import RewardInput, RewardPool
from offbeat.rollout.engine import Engine, Request
from offbeat.serve.evaluation import eval_figures


def evaluate(config: Config, *, reward: Callable[..., Any] | None = None, log: Path | None = None) -> dict[str, float]:
    """mean@k and pass@k of `model.path` as `eval` says: prompts, samples, temperature, top_p, top_k."""
    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(_evaluate(config, reward, log or Path(scratch) / "rewards.log"))


async def _evaluate(config: Config, reward: Callable[..., Any] | None, log: Path) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        wiring.set_threads(config)
        tokens = wiring.load_tokens(config)
        mixture = wiring.make_mixture(config, reward)
        pool = await wiring.open_pool(config, mixture, log)
        stack.push_async_callback(pool.close)
        groups = wiring.make_issuer(config, mixture, tokens).held_out(version=0)
        if not groups:
            raise UserError("task: no source has a held-out split; set held_out on a file or dataset task")
        engine = wiring.make_engine(config, "eval", version=0)
        stack.push_async_callback(engine.close)
        judged = await asyncio.gather(*(_judge(group, engine, pool, tokens) for group in groups))
    figures = eval_figures(EvalRound(step=0, is_abandoned=False, groups=tuple(judged)))
    figures.pop("eval_step")
    figures["eval_failed"] = sum(group.num_failed for group in judged)
    return figures


async def _judge(group: NewGroup, engine: Engine, pool: RewardPool, tokens: wiring.Tokens) -> EvalGroup:
    requests = [
        Request(
            id=f"{group.ordinal}-{member}",
            tokens=group.prompt_tokens,
            seed=derive_seed(group.seed, member),
            sampling=group.sampling,
        )
        for member in range(group.size)
    ]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    texts = tokens.decode([generation.segments[0].tokens for generation in generations])
    problem = group.problem
    inputs = [
        RewardInput(prompt=problem["prompt"], response=text, answer=problem["answer"], info=problem["info"])
        for text in texts
    ]
    results = await pool.score(group.reward, inputs)
    values = tuple(sum(reward.value for reward in result.rewards) for result in results if result.rewards is not None)
    return EvalGroup(
        group=group.ordinal,
        ordinal=group.ordinal,
        source=group.source,
        state=GroupState.EVALUATED,
        reason=None,
        rewards=values,
        num_failed=group.size - len(values),
        size=group.size,
    )
