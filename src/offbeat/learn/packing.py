"""Micro-batches without padding: every sample's tokens in one long row, a shared prompt only once.

A row holds, for each group in it, the prompt and then each member's response without its last token, which predicts
nothing. Layers that work token by token see no padding at all. Attention needs sequences, so a `Layout` says how to
gather them: samples are put into buckets of similar length, each sample's keys are its prompt's and its own tokens, and
`restore` takes the results back to the row. What a prompt's tokens attend to is the same for every member, so the
first member's result stands for all.

A model that cannot attend so takes the same sequences as rows of their own, right-padded: the buckets' tables are those
rows, and `restore` takes their results to the packed row all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.learn.samples import Sample

BUCKET_RATIO = 0.6
"""A bucket's shortest sample is at least this share of its longest: so much of attention at most is padding."""


@dataclass(frozen=True)
class Layout:
    """How attention finds sequences in a packed row."""

    buckets: tuple[Tensor, ...]
    """For each bucket a (samples, length) table of row positions, right-padded with a position that is never read."""
    restore: Tensor
    """For each row position, its place in the concatenated results of the buckets."""


@dataclass(frozen=True)
class Microbatch:
    """Samples packed into one row, with everything the loss needs per trained position."""

    samples: tuple[int, ...]
    """Indices of the packed samples, in the order of their targets."""
    tokens: Tensor
    positions: Tensor
    layout: Layout
    predict_from: Tensor
    """The row positions whose logits are needed, each once."""
    target_row: Tensor
    """For each target, which of `predict_from` predicts it; members of a group share their first."""
    targets: Tensor
    """Response tokens of all samples, one after the other."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


def plan(samples: Sequence[Sample], tokens_per_microbatch: int, *, shares_prompts: bool = True) -> list[list[int]]:
    """Splits samples into micro-batches of at most so many row tokens, keeping groups together where they fit.

    `shares_prompts` says whether a group's prompt counts once, or for each member. Order is by group and then by place
    in `samples`; it depends on nothing else. A sample that is alone over the limit gets a micro-batch of its own.
    """
    order = sorted(range(len(samples)), key=lambda i: (samples[i].prompt_id, i))
    batches: list[list[int]] = []
    room, prompt_id = 0, None
    for i in order:
        sample = samples[i]
        own = max(sample.num_tokens - 1, 0)
        is_shared = shares_prompts and batches and sample.prompt_id == prompt_id
        cost = own if is_shared else own + len(sample.prompt)
        if not batches or cost > room:
            batches.append([])
            room, cost = tokens_per_microbatch, own + len(sample.prompt)
        batches[-1].append(i)
        room, prompt_id = room - cost, sample.prompt_id
    return batches


def pack(samples: Sequence[Sample], chosen: Sequence[int], device: torch.device) -> Microbatch:
    """Packs the chosen samples, which `plan` put side by side, into one row."""
    row, positions, predict, target_row, targets = [], [], [], [], []
    sequences: list[np.ndarray] = []
    size = num_predict = 0
    prompt_id, prompt_at, prompt_predicts = None, np.zeros(0, np.int64), 0
    for i in chosen:
        sample = samples[i]
        if sample.prompt_id != prompt_id:
            prompt_id = sample.prompt_id
            row.append(sample.prompt)
            positions.append(np.arange(len(sample.prompt)))
            prompt_at = np.arange(size, size + len(sample.prompt))
            size += len(sample.prompt)
            predict.append(prompt_at[-1:])
            prompt_predicts = num_predict
            num_predict += 1
        own = max(sample.num_tokens - 1, 0)
        own_at = np.arange(size, size + own)
        row.append(sample.response[:own])
        positions.append(np.arange(len(sample.prompt), len(sample.prompt) + own))
        sequences.append(np.concatenate([prompt_at, own_at]))
        predict.append(own_at)
        if sample.num_tokens:
            target_row.append(np.concatenate([[prompt_predicts], np.arange(num_predict, num_predict + own)]))
        targets.append(sample.response)
        size += own
        num_predict += own

    def tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.as_tensor(np.concatenate(parts).astype(np.int64), device=device)

    return Microbatch(
        samples=tuple(chosen),
        tokens=tensor(row),
        positions=tensor(positions),
        layout=_layout(sequences, size, device),
        predict_from=tensor(predict),
        target_row=tensor(target_row) if target_row else torch.zeros(0, dtype=torch.int64, device=device),
        targets=tensor(targets),
    )


def _layout(sequences: Sequence[np.ndarray], size: int, device: torch.device) -> Layout:
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    runs: list[list[int]] = []
    for i in order:
        if not runs or len(sequences[i]) < BUCKET_RATIO * len(sequences[runs[-1][0]]):
            runs.append([])
        runs[-1].append(i)
    buckets, restore, offset = [], np.zeros(size, np.int64), 0
    for run in runs:
        length = len(sequences[run[0]])
        table = np.zeros((len(run), length), np.int64)
        for line, i in enumerate(run):
            table[line, : len(sequences[i])] = sequences[i]
            restore[sequences[i]] = offset + line * length + np.arange(len(sequences[i]))
        buckets.append(torch.as_tensor(table, device=device))
        offset += table.size
    return Layout(tuple(buckets), torch.as_tensor(restore, device=device))
