"""Writes the table of models for the documentation from a benchmark's results."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.architectures.compare import Result, Verdict

INTRODUCTION = """\
# Models

Offbeat trains and serves Hugging Face causal language models with transformers' own code. This table is written by
`python -m benchmarks.architectures --page docs/models.md`: every causal architecture of transformers {version}, tiny
and random, in Offbeat's trainer and in its embedded engine, compared with its own forward pass. Log-probs agree to
1e-4, and gradients to 1e-4 of the largest, with windows shorter than the sequences, prompts of one token, uneven rows
and interrupted requests.

- **packed**: trained with all samples of a micro-batch in one row, a group's prompt only once.
- **rows**: trained with one row per sample, because tokens interact outside of replaceable attention.
  Slower, and `batch.tokens_per_microbatch` counts a group's prompt for each member.
- **slots**: generates with a KV cache.
- **anew**: generates by recomputing every row from its first token at each step: for short answers and small models.
  `rollout.engine = "vllm"` is faster if vLLM supports the model.
- **refused**: fails at the start with one line.

The class of a model is found by probing its forward pass when a trainer or an engine starts, so architectures that are
not listed are handled in the same way. A few tokens then go through the model together and separately; if their
log-probs differ, the model is refused. That takes five passes over a dozen tokens: milliseconds on a GPU,
and for 1.5 billion parameters in float32 on two CPU cores about fifteen seconds.

Of {built} architectures that could be built tiny, {trained} can be trained and {served} served by the embedded engine.

Positions coded by `longrope` (Phi-3 with 128k, Phi-4-mini) change for all rows once one is longer than the model's
original window. Prompt and answer together must fit into that window; a longer limit is refused.

## Architectures

| architecture | trainer | embedded engine |
|---|---|---|
{rows}

## Why refused

{refusals}

## Not built

Those of which no tiny model could be made; nothing is known of them but what they say at the start.

| architecture | error |
|---|---|
{errors}
"""


def written(results: Sequence[Result], version: str) -> str:
    built = [result for result in results if result.error is None]
    return INTRODUCTION.format(
        version=version,
        built=len(built),
        trained=sum(result.trainer is not None and result.trainer.status == "agrees" for result in built),
        served=sum(result.engine is not None and result.engine.status == "agrees" for result in built),
        rows="\n".join(f"| {one.name} | {cell(one.trainer)} | {cell(one.engine)} |" for one in built),
        refusals="\n".join(_reasons(built)),
        errors="\n".join(f"| {one.name} | {_safe(one.error)} |" for one in results if one.error is not None),
    )


def cell(verdict: Verdict | None) -> str:
    """Describes how a part of Offbeat runs a model, or why it does not."""
    if verdict is None:
        return ""
    return verdict.way if verdict.status == "agrees" else verdict.status


def _reasons(results: Sequence[Result]) -> list[str]:
    return [
        f"- {result.name}, {part}: {_safe(verdict.why)}"
        for result in results
        for part, verdict in (("trainer", result.trainer), ("engine", result.engine))
        if verdict is not None and verdict.status == "refused"
    ]


def _safe(text: str | None) -> str:
    """Escapes a text for a table's cell."""
    return (text or "").replace("|", "\\|").replace("\n", " ")
