"""Evaluates a run's newest weights, or a model, on held-out prompts: `offbeat eval` and `Run.evaluate`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from offbeat.config import load
from offbeat.config.schema import Config
from offbeat.coordinator.reward_queue import inputs_of
from offbeat.data.mixture import Functions, Mixture, RewardSpec
from offbeat.engines.protocol import Engine, Request
from offbeat.environments.pool import EnvironmentFailed
from offbeat.errors import OffbeatError, UserError
from offbeat.launch import episode_parts, stopping, wiring
from offbeat.launch.run_folder import CONFIG
from offbeat.ledger.records import EvalGroup, EvalRound, GroupState, NewGroup, Purpose, Unscored, derive_seed
from offbeat.observability.metrics import eval_figures
from offbeat.rewards.pool import FailureWatch, RewardInput, RewardPool, Shaping
from offbeat.trajectory import EpisodeStart, Task, total, total_problem
from offbeat.worker.episodes import Episodes
from offbeat.worker.worker import play_through


def evaluate_run(
    run: Path,
    *,
    prompts: int | None = None,
    samples: int | None = None,
    reward: RewardSpec | None = None,
    functions: Functions | None = None,
) -> dict[str, float]:
    """Returns mean@k and pass@k of a run's newest weights on the run's own tasks. `prompts` and `samples` replace
    `eval.prompts` and `eval.samples`. If the run was started from Python with a reward or with functions that make
    prompts, give these again as `reward` and `functions`."""
    given = {"eval.prompts": prompts, "eval.samples": samples, "run.name": "none"}
    words = [f"--{key}={value}" for key, value in given.items() if value is not None]
    mixture = wiring.make_mixture(load(run / CONFIG, words), reward, functions, run)
    if prompts is not None:
        warn_of_few(mixture, prompts)
    with weights_of(run) as folder:
        return evaluate(load(run / CONFIG, [*words, f"--model.path={folder}"]), mixture)


def warn_of_few(mixture: Mixture, prompts: int) -> None:
    """Warns if the tasks of `mixture` hold out fewer than the `prompts` that were asked for."""
    if 0 < (num := len(mixture.held_out(prompts))) < prompts:
        print(
            f"warning: eval.prompts = {prompts}: the tasks hold out only {num} prompts, and all of these are "
            "evaluated; to hold out more, start a new run with a larger task.held_out",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def weights_of(run: Path) -> Iterator[Path]:
    """Yields a temporary folder with the model that a run has trained so far."""
    from offbeat.tools.export import export_run

    with tempfile.TemporaryDirectory(prefix="offbeat-eval-") as scratch:
        export_run(run, Path(scratch) / "model")
        yield Path(scratch) / "model"


def evaluate(config: Config, mixture: Mixture) -> dict[str, float]:
    """Returns mean@k and pass@k of the model `model.path` on the held-out problems of `mixture`; section `eval` sets
    prompts, samples, temperature and top_p. Rewards log to a temporary file, which is kept unless it is empty."""
    descriptor, name = tempfile.mkstemp(prefix="offbeat-eval-", suffix=".log")
    os.close(descriptor)
    try:
        return stopping.run(_evaluate(config, mixture, Path(name)))
    finally:
        if not os.path.getsize(name):
            os.unlink(name)


async def _evaluate(config: Config, mixture: Mixture, log: Path) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        wiring.need_processes(config, "judges cannot join an evaluation; add --reward.processes 1")
        pool = await wiring.open_pool(config, mixture, log)
        stack.push_async_callback(pool.close)
        with stopping.interruptible():
            from offbeat.launch import model_parts

            model_parts.prepare_torch(config)
            tokens = wiring.load_tokens(config)
            parts = await episode_parts.describe(config)
            groups = wiring.make_issuer(config, mixture, tokens, parts).held_out(version=0)
            if not groups:
                raise UserError(
                    "task: no prompts are held out for an evaluation; set held_out in a [[task]] whose source is a "
                    "file or a dataset"
                )
            engine = model_parts.make_embedded(config, "eval", version=0)
        stack.push_async_callback(engine.close)
        episodes = await stack.enter_async_context(episode_parts.playing(config, tokens, log))
        watch = FailureWatch(config.reward.max_failure_share, window=sum(group.size for group in groups), min_count=1)
        judged = await asyncio.gather(
            *(_judge(group, engine, pool, wiring.make_shaping(config), tokens, watch, episodes) for group in groups)
        )
    if reason := watch.verdict():
        raise OffbeatError(f"{reason}; fix the reward{f' (see {log})' if log.stat().st_size else ''}")
    figures = eval_figures(EvalRound(step=0, is_abandoned=False, groups=tuple(judged)))
    figures.pop("eval_step")
    figures["eval_failed"] = sum(group.num_failed for group in judged)
    return figures


async def _judge(
    group: NewGroup,
    engine: Engine,
    pool: RewardPool,
    shaping: Shaping,
    tokens: wiring.TokenLimits,
    watch: FailureWatch,
    episodes: Episodes | None,
) -> EvalGroup:
    if episodes is not None and group.source in episodes.forms:
        inputs = await _play(group, engine, tokens, episodes, watch)
    else:
        inputs = await _answer(group, engine, tokens)
    results = await pool.score(group.reward, inputs)
    values = []
    for result in results:
        rewards = shaping.weighted(result.rewards)
        error = result.error or total_problem(rewards)
        watch.record(failed=error is not None, reason=error)
        if error is None:
            values.append(total(rewards))
    return EvalGroup(
        group=group.ordinal,
        ordinal=group.ordinal,
        source=group.source,
        state=GroupState.EVALUATED,
        reason=None,
        rewards=tuple(values),
        num_failed=group.size - len(values),
        size=group.size,
    )


async def _play(
    group: NewGroup, engine: Engine, tokens: wiring.TokenLimits, episodes: Episodes, watch: FailureWatch
) -> list[RewardInput]:
    """Plays the episodes of a group; leaves out those whose environment failed."""
    start = EpisodeStart(group.source, group.problem, group.seed)

    async def play(member: int) -> Unscored | None:
        number = group.ordinal * group.size + member
        seed = derive_seed(group.seed, member)
        task = Task(number, group.ordinal, group.prompt_tokens, seed, group.sampling, episode=start)
        try:
            trajectory = await play_through(task, engine, episodes)
        except EnvironmentFailed as error:
            watch.record(failed=True, reason=f"environment: {error}")
            return None
        assert trajectory.end is not None
        return Unscored(
            number,
            group.ordinal,
            Purpose.EVAL,
            group.problem,
            group.reward,
            trajectory.tokens,
            trajectory.end,
            seq=0,
            trajectory=trajectory,
            stop_token_ids=group.sampling.stop_token_ids,
        )

    played = await asyncio.gather(*(play(member) for member in range(group.size)))
    return inputs_of([sample for sample in played if sample is not None], tokens.decode)


async def _answer(group: NewGroup, engine: Engine, tokens: wiring.TokenLimits) -> list[RewardInput]:
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
    responses = [generation.segments[0].tokens for generation in generations]
    problem = group.problem
    return [
        RewardInput(text, problem["answer"], problem["prompt"], problem["info"], response.tolist())
        for text, response in zip(tokens.decode(responses), responses, strict=True)
    ]
