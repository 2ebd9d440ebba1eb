"""Makes the folder of a run as long as no test could train: through the ledger's own schema, but row by row in bulk.

Every row satisfies the schema's constraints and foreign keys, and the sums of tokens hold; only seeds and digests,
which nobody looks at here, are made up. A step trains one group. Rewards rise with the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.trajectory import End, Sampling, Segment, Trajectory

GROUP_SIZE = 10
NUM_WORKERS = 8
NUM_TOKENS = 12
NUM_TEXTS = 50
BEGAN_AT = 1_700_000_000.0
STEP_S = 2.0
SPIKE_EVERY = 9973
"""Steps between two spikes of the gradient's norm: one step alone, which must stay visible among a hundred thousand."""
SPIKE = 50.0
CHUNK_ROWS = 20_000


def make(folder: Path, num_steps: int) -> None:
    """Makes the run in `folder`: a group of `GROUP_SIZE` answers a step."""
    folder.mkdir(parents=True)
    config = {"model": {"path": "offbeat-tiny", "tokenizer": None}, "run": {"steps": num_steps}}
    (folder / "config.json").write_text(json.dumps(config))
    event = {"event": "start", "time": "2026-11-15T13:09:15+0000", "attempt": 1}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in metrics(num_steps))
    with open(folder / "trace.json", "w") as file:
        file.write("[\n")
        file.writelines(json.dumps(span) + ",\n" for span in _spans(num_steps))
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.execute("PRAGMA synchronous = OFF")  # this run may be made again
        ledger.execute("BEGIN")
        for table, columns, rows in _tables(num_steps):
            query = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(columns.split(',')))})"
            ledger.executemany(query, rows)
        ledger.execute("COMMIT")


def reward(step: int, member: int) -> float:
    """Reward of a member of the group of a step, counted from 1."""
    return float((step * 7 + member * 3) % 10 < 2 + min(7, step * 8 // 100_000))


def metrics(num_steps: int) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(num_steps + 1, 4))
    for step in range(1, num_steps + 1):
        rewards = [reward(step, member) for member in range(GROUP_SIZE)]
        a, b, c, d = noise[step].tolist()
        row = {"step": step, "reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))}
        row |= {"reward_min": min(rewards), "reward_max": max(rewards), "length": NUM_TOKENS + a, "length_max": 20}
        row |= {"cut_share": 0.0, "lr": 1e-5, "loss": 0.01 * b, "entropy": 0.5 + 0.01 * c, "kl": abs(0.01 * d)}
        row |= {"grad_norm": SPIKE if step % SPIKE_EVERY == 0 else 1 + 0.1 * a, "ess": 0.99, "clip_share": 0.01}
        row |= {"logprob_gap": abs(1e-3 * b), "signal_share": 0.8, "kept_share": 1.0, "clamped_share": 0.0}
        row |= {"staleness": 1.0, "staleness_max": 1, "off_policy_share": 1.0, "num_tokens/staleness_1": 120}
        row |= {"samples": GROUP_SIZE, "tokens": GROUP_SIZE * NUM_TOKENS, "tokens_per_second": 60 + c}
        row |= {"samples_per_second": 5 + d, "time_wait_s": 0.8, "time_train_s": 1.0, "time_publish_s": 0.2}
        row |= {"seconds": STEP_S, "attempt": 1, "failures": 0, "partials": 0, "workers": NUM_WORKERS}
        yield row | ({"eval_mean@1": 0.5, "eval_samples": 200, "eval_prompts": 200} if step % 1000 == 0 else {})


def _spans(num_steps: int) -> Iterator[dict[str, Any]]:
    for lane, name in enumerate(("trainer", "worker w0")):
        yield {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
    for step in range(num_steps):
        start_us = 1e6 * (BEGAN_AT + STEP_S * step)
        for lane, name, at_s, seconds in ((0, "wait", 0.0, 0.8), (0, "train", 0.8, 1.0), (0, "publish", 1.8, 0.2)):
            yield {"name": name, "ph": "X", "ts": start_us + 1e6 * at_s, "dur": 1e6 * seconds, "pid": 1, "tid": lane}
        yield {"name": "generate", "ph": "X", "ts": start_us, "dur": 0.7e6, "pid": 1, "tid": 1, "args": {"answers": 10}}


def _tables(num_steps: int) -> Iterator[tuple[str, str, Iterator[tuple[Any, ...]]]]:
    steps, members = range(num_steps), range(GROUP_SIZE)
    sampling = json.dumps({"max_new_tokens": NUM_TOKENS})
    tokens, num = GROUP_SIZE * NUM_TOKENS, GROUP_SIZE
    bodies = [_body(number) for number in range(NUM_TEXTS)]
    digests = [blake3(body).digest() for body in bodies]
    tasks = [(step, member, step * num + member + 1) for step in steps for member in members]

    def at(step: int) -> float:
        return BEGAN_AT + STEP_S * step

    yield (
        "versions", "number, step, parent, digest, path, published_at",
        ((step, step, step - 1 if step else None, f"weights of {step}", f"weights/{step}", at(step))
         for step in range(num_steps + 1)),
    )  # fmt: skip
    yield (
        "batches", "id, step, bound, state, from_version, to_version, num_trained_tokens, num_stale_tokens, "
        "num_abandoned_tokens, max_staleness, last_reward, claimed_at, trained_at",
        ((step + 1, step, 4, "trained", step, step + 1, tokens, 0, 0, min(1, step), (step + 1) * num, at(step),
          at(step)) for step in steps),
    )  # fmt: skip
    prompts = [np.array([3 + number % 10, 4], np.int32).tobytes() for number in range(NUM_TEXTS)]
    yield (
        "groups", "id, purpose, ordinal, retry, source, source_ordinal, sibling, seed, size, first_step, state, batch, "
        "num_open, num_scored, num_trajectories, num_sampled_tokens, admitted_at, ended_at, reward, sampling, prompt, "
        "problem",
        ((step + 1, "train", step, 0, "sums" if step % 3 else "products", step, 0, step, num, max(0, step - 1),
          "trained", step + 1, 0, num, num, tokens, at(step), at(step), "number", sampling, prompts[step % NUM_TEXTS],
          '{"prompt": "1+1=", "answer": "2", "info": {}}') for step in steps),
    )  # fmt: skip
    yield (
        "tasks", "id, group_id, member, seed, state, worker, fence, leased_at",
        ((task, step + 1, member, task, "scored", f"w{task % NUM_WORKERS}", 1, at(step))
         for step, member, task in tasks),
    )  # fmt: skip
    yield (
        "trajectories", "seq, task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, worker, fence, "
        "accepted_at, body",
        ((task, task, 0, digests[task % NUM_TEXTS], "stop", NUM_TOKENS, NUM_TOKENS, f"w{task % NUM_WORKERS}", 1,
          at(step) + member / 100, bodies[task % NUM_TEXTS]) for step, member, task in tasks),
    )  # fmt: skip
    yield (
        "segments", "task, trajectory_index, start, num_tokens, version, worker",
        ((task, 0, 0, NUM_TOKENS, max(0, step - 1), f"w{task % NUM_WORKERS}") for step, _, task in tasks),
    )  # fmt: skip
    yield (
        "rewards", "task, value, digest, scored_at, parts",
        ((task, reward(step + 1, member), b"", at(step), "[]") for step, member, task in tasks),
    )  # fmt: skip
    yield (
        "batch_members", "batch, task, num_trained_tokens, num_stale_tokens, num_abandoned_tokens",
        ((step + 1, task, NUM_TOKENS, 0, 0) for step, _, task in tasks),
    )  # fmt: skip


def _body(number: int) -> bytes:
    """Returns an encoded answer of `NUM_TOKENS` tokens, which many tasks share."""
    sampling = Sampling(max_new_tokens=NUM_TOKENS)
    answer = Trajectory(number + 1, np.array([3, 4], np.int32), sampling.max_new_tokens)
    tokens = (3 + (number + np.arange(NUM_TOKENS)) % 12).astype(np.int32)
    segment = Segment(0, tokens, logprobs=np.full(NUM_TOKENS, -0.5, np.float32), version=0, kv_version=0, worker="w0")
    answer.append(replace(segment, engine="embedded torch-2 float32 cpu"), End.STOP)
    return answer.encode()
