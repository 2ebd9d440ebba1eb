"""Samples of a batch, and micro-batches without padding: all tokens in one row, a shared prompt only once.

For each prompt, the row holds the prompt and then each of its responses without the last token, which predicts nothing.
So layers that work token by token compute no padding. For attention, a `RowLayout` says how to gather the sequences
(each a prompt and a response). Sequences of similar length form a bucket. Each sequence attends only to itself, and
`restore` maps the results back to the row. A prompt has the same results in all of its sequences, so the results of any
one of them are used.

A model that cannot be run on such a row (`Usage.packs`) gets the sequences as right-padded rows, one row each.

Several ranks divide the micro-batches (`passes`), and all make the same number of passes. A rank without a micro-batch
in the last round runs the shortest sample once more, and its result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.ledger.records import Batch
from offbeat.trainer.rounds import Arrays, Turn, by_cost, cost, turns
from offbeat.trajectory import Segment, Trajectory

if TYPE_CHECKING:
    from offbeat.trainer.policy import Forward, Policy


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory (prompt and answer) of a batch as numpy arrays, with its reward and the facts that training needs.
    Arrays other than `prompt` have one entry per response token."""

    group: int
    prompt: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray
    """Log-probs that the engine reported for the response tokens; 0 for given tokens, which no engine sampled."""
    mask: np.ndarray
    """True where a response token may be trained on."""
    reward: float
    """Weighted sum of all reward parts."""
    staleness: np.ndarray | None = None
    """Staleness of each response token in steps, valid where `mask` is True; None: 0 everywhere."""
    sampled: np.ndarray | None = None
    """True where a response token was sampled, even if it is too old to be trained on; None: same as `mask`."""
    rewards: tuple[tuple[int, float], ...] = ()
    """Parts of the reward as (response position, weighted value); empty: all of `reward` is at the last token."""
    segment: np.ndarray | None = None
    """For each response token, the response position at which its segment starts; None: there is one segment."""
    version: np.ndarray | None = None
    """Number of the version that sampled each response token; None: unknown, so only fresh tokens can be audited."""
    old_kv: np.ndarray | None = None
    """True where a response token attended to keys and values of weights older than its version; None: nowhere."""
    siblings: int | None = None
    """Id of the prompt if its answers are claimed separately, in several groups; None: they are all in `group`."""
    earlier: tuple[float, ...] = ()
    """Rewards, known when the batch was claimed, of other answers to the prompt that are not in the batch."""
    is_proven: bool = True
    """Whether earlier audits found the sample's workers honest; if not, every token that can be audited is audited."""

    def __post_init__(self) -> None:
        lengths = {len(self.response), len(self.logprobs), len(self.mask), len(self.ages)}
        assert len(lengths) == 1, (
            f"group {self.group}: tokens, log-probs, mask and staleness differ in length: {lengths}"
        )
        assert len(self.prompt) > 0, f"group {self.group}: the prompt is empty; it must have at least one token"

    @property
    def prompt_id(self) -> int:
        """Id of the prompt. Samples with the same id share the prompt's tokens in a packed row, and their rewards are
        compared with each other."""
        return self.group if self.siblings is None else self.siblings

    @property
    def ages(self) -> np.ndarray:
        """Staleness of each response token in steps; -1 where a token is not trained on."""
        if self.staleness is None:
            return np.where(self.mask, 0, -1)
        return np.where(self.mask, self.staleness, -1)

    @property
    def is_fresh(self) -> np.ndarray:
        """True where a trained token was sampled with weights and KV cache of the version that the step begins with."""
        return (self.ages == 0) & self._own_kv

    @property
    def is_stale(self) -> np.ndarray:
        """True where a trained token was sampled with weights and KV cache of one and the same older version."""
        return (self.ages > 0) & self._own_kv

    @property
    def _own_kv(self) -> np.ndarray | bool:
        return True if self.old_kv is None else ~self.old_kv

    @property
    def starts(self) -> np.ndarray:
        """For each response token, the response position at which its segment starts."""
        return np.zeros(self.num_tokens, np.int64) if self.segment is None else self.segment

    @property
    def counted(self) -> np.ndarray:
        """True where a token counts in the loss's denominators. Sampled tokens that are too old to train on count too,
        so that leaving them out does not raise the weight of the others."""
        return self.mask if self.sampled is None else self.sampled | self.mask

    @property
    def num_tokens(self) -> int:
        return len(self.response)


def samples_of(batch: Batch) -> Sequence[Sample]:
    """Returns the samples of a claimed batch: one for each member of each group, in the batch's order."""
    return [
        Sample(
            group=group.group,
            prompt=member.trajectory.prompt,
            response=member.trajectory.tokens,
            logprobs=member.trajectory.logprobs,
            mask=member.mask,
            reward=member.reward,
            staleness=member.staleness,
            sampled=member.trajectory.sampled_mask,
            segment=_per_token(member.trajectory, [segment.start for segment in member.trajectory.segments]),
            version=member.trajectory.versions,
            old_kv=_per_token(member.trajectory, [_has_old_kv(segment) for segment in member.trajectory.segments]),
            rewards=tuple((part.position, part.weight * part.value) for part in member.rewards),
            siblings=group.prompt,
            earlier=group.earlier,
            is_proven=member.is_proven,
        )
        for group in batch.groups
        for member in group.members
    ]


def _per_token(trajectory: Trajectory, values: Sequence[int | bool]) -> np.ndarray:
    """Returns an array with one entry per response token: the entry of `values` for the token's segment."""
    return np.repeat(values, [len(segment.tokens) for segment in trajectory.segments])


def _has_old_kv(segment: Segment) -> bool:
    """Whether the segment's tokens attended to keys and values of an older version than their own."""
    return segment.version is not None and segment.kv_version is not None and segment.kv_version < segment.version


BUCKET_RATIO = 0.6
"""Smallest allowed ratio of a bucket's shortest sequence to its longest one; bounds the padding in attention."""


@dataclass(frozen=True)
class Varlen:
    """Row layout for attention kernels that take sequences of uneven length: without padding, and without copied
    queries.

    The row is cut into runs: each run is a prompt, or a response without its last token. The queries of a response
    attend to the keys of its prompt and to its own keys. So a prompt's keys are repeated for each response.
    """

    keys: Tensor
    """Row position of each key, run after run; a response's run begins with its prompt's keys."""
    query_ends: Tensor
    """0, and then the row position after the end of each run."""
    key_ends: Tensor
    """0, and then the index in `keys` after the end of each run's keys."""
    max_queries: int
    max_keys: int
    uses: Tensor
    """Indices into `keys`, sorted by the row position that `keys` holds there."""
    first_uses: Tensor
    """For each row position, the index of its first entry in `uses`."""


class RowLayout:
    """Where the sequences (each a prompt and a response) lie in a packed row, in the forms that attention reads."""

    def __init__(self, sequences: Sequence[np.ndarray], runs: Sequence[tuple[int, np.ndarray]], device: torch.device):
        self.sequences, self.runs, self.device = sequences, runs, device
        """`sequences` holds the row positions of each sequence. `runs` holds, for each run of `Varlen`, its number of
        queries and the row positions of its keys."""

    @property
    def buckets(self) -> tuple[Tensor, ...]:
        """For each bucket (sequences of similar length), a (sequences, length) table of row positions. It is padded on
        the right with position 0, and results at the padding are not read."""
        return self._gathered[0]

    @property
    def restore(self) -> Tensor:
        """For each row position, the index of its result among the results of all buckets, flattened and joined."""
        return self._gathered[1]

    @cached_property
    def _gathered(self) -> tuple[tuple[Tensor, ...], Tensor]:
        sequences = self.sequences
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        groups: list[list[int]] = []
        for i in order:
            if not groups or len(sequences[i]) < BUCKET_RATIO * len(sequences[groups[-1][0]]):
                groups.append([])
            groups[-1].append(i)
        buckets, restore, offset = [], np.zeros(self._size, np.int64), 0
        for group in groups:
            length = len(sequences[group[0]])
            table = np.zeros((len(group), length), np.int64)
            for line, i in enumerate(group):
                table[line, : len(sequences[i])] = sequences[i]
                restore[sequences[i]] = offset + line * length + np.arange(len(sequences[i]))
            buckets.append(to_device(table, self.device))
            offset += table.size
        return tuple(buckets), to_device(restore, self.device)

    @cached_property
    def varlen(self) -> Varlen:
        keys = np.concatenate([own for _, own in self.runs])
        counts, num_keys = [count for count, _ in self.runs], [len(own) for _, own in self.runs]
        ends = [to_device(np.cumsum([0, *each]).astype(np.int32), self.device) for each in (counts, num_keys)]
        first_uses = np.cumsum([0, *np.bincount(keys, minlength=self._size)[:-1]])
        uses = np.argsort(keys, kind="stable")
        return Varlen(
            keys=to_device(keys, self.device),
            query_ends=ends[0],
            key_ends=ends[1],
            max_queries=max(counts),
            max_keys=max(num_keys),
            uses=to_device(uses, self.device),
            first_uses=to_device(first_uses, self.device),
        )

    @property
    def _size(self) -> int:
        return sum(count for count, _ in self.runs)


@dataclass(frozen=True)
class Microbatch:
    """Samples packed into one row of tokens, and for each response token the row position that predicts it."""

    samples: tuple[int, ...]
    """Indices of the packed samples in the batch, in the order in which `targets` holds their tokens."""
    tokens: Tensor
    positions: Tensor
    layout: RowLayout
    predict_from: Tensor
    """Row positions whose logits predict `targets`; each position stands here once."""
    target_row: Tensor
    """For each target, the index in `predict_from` of the position that predicts it. The first targets of all responses
    to a prompt share one position, the prompt's last token."""
    targets: Tensor
    """Tokens to predict: the response tokens of all packed samples, one sample after the other."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()


def plan(samples: Sequence[Sample], tokens_per_microbatch: int, *, shares_prompts: bool = True) -> list[list[int]]:
    """Splits samples into micro-batches of at most `tokens_per_microbatch` row tokens, returned as sample indices.

    Samples are ordered by prompt id, then by index, so that neighbours can share a prompt. With `shares_prompts`, a
    prompt counts once per micro-batch, otherwise once for each sample. A sample over the limit gets a micro-batch of
    its own.
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
    """Packs the samples with the indices `chosen` into one row; `chosen` must be in the order of `plan`."""
    row, positions, predict, target_row, targets = [], [], [], [], []
    sequences: list[np.ndarray] = []
    runs: list[tuple[int, np.ndarray]] = []
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
            runs.append((len(sample.prompt), prompt_at))
            predict.append(prompt_at[-1:])
            prompt_predicts = num_predict
            num_predict += 1
        own = max(sample.num_tokens - 1, 0)
        own_at = np.arange(size, size + own)
        row.append(sample.response[:own])
        positions.append(np.arange(len(sample.prompt), len(sample.prompt) + own))
        sequences.append(np.concatenate([prompt_at, own_at]))
        if own:
            runs.append((own, sequences[-1]))
        predict.append(own_at)
        if sample.num_tokens:
            target_row.append(np.concatenate([[prompt_predicts], np.arange(num_predict, num_predict + own)]))
        targets.append(sample.response)
        size += own
        num_predict += own

    def joined(parts: Sequence[np.ndarray]) -> Tensor:
        return to_device(np.concatenate(parts).astype(np.int64), device)

    return Microbatch(
        samples=tuple(chosen),
        tokens=joined(row),
        positions=joined(positions),
        layout=RowLayout(sequences, runs, device),
        predict_from=joined(predict),
        target_row=joined(target_row) if target_row else torch.zeros(0, dtype=torch.int64, device=device),
        targets=joined(targets),
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns the array as a tensor on `device`. For a GPU, does not wait until work that is queued there is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def passes(
    policy: Policy, samples: Sequence[Sample], chosen: Sequence[int], tokens_per_microbatch: int
) -> Iterator[tuple[Turn, Microbatch]]:
    """Yields this rank's micro-batches of the samples with the indices `chosen`."""
    some, shares_prompts = [samples[i] for i in chosen], policy.usage.packs
    plans = [[chosen[i] for i in local] for local in plan(some, tokens_per_microbatch, shares_prompts=shares_prompts)]
    order = by_cost([_cost([samples[i] for i in own], policy.width) for own in plans])
    for turn in turns(order, policy.ranks.rank, policy.ranks.size):
        own = [_shortest(samples, chosen)] if turn.index is None else plans[turn.index]
        yield turn, pack(samples, own, policy.device)


class Inferred(NamedTuple):
    """Result of a pass for one sample, with one number for each response token."""

    logprobs: np.ndarray
    values: np.ndarray | None
    """Estimates of the value head; None without one."""


def infer(
    policy: Policy,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    tokens_per_microbatch: int,
    run: Callable[[Microbatch], Forward],
) -> dict[int, Inferred]:
    """Runs a pass without gradients over the chosen samples; returns the results of all ranks, by sample. `run` makes
    the pass."""
    items: list[tuple[int, Arrays]] = []
    for turn, batch in passes(policy, samples, chosen, tokens_per_microbatch):
        found = run(batch)
        if turn.index is not None:
            arrays = {"samples": np.array(batch.samples), "logprobs": found.logprobs.cpu().numpy()}
            if found.values is not None:
                arrays["values"] = found.values.cpu().numpy()
            items.append((turn.place, arrays))
    results: dict[int, Inferred] = {}
    for _, arrays in policy.ranks.merge(items):
        own = arrays["samples"].tolist()
        ends = np.cumsum([samples[i].num_tokens for i in own])[:-1]
        logprobs = np.split(arrays["logprobs"], ends)
        values = np.split(arrays["values"], ends) if "values" in arrays else [None] * len(own)
        results.update({i: Inferred(one, value) for i, one, value in zip(own, logprobs, values, strict=True)})
    return results


def _cost(samples: Sequence[Sample], width: int) -> int:
    lengths = [len(sample.prompt) + sample.num_tokens for sample in samples]
    prompts = {sample.prompt_id: len(sample.prompt) for sample in samples}
    return cost(sum(prompts.values()) + sum(sample.num_tokens for sample in samples), lengths, width)


def _shortest(samples: Sequence[Sample], chosen: Sequence[int]) -> int:
    """Returns the index of the shortest sample that has a token to predict, if any has one."""
    return min(chosen, key=lambda i: (samples[i].num_tokens == 0, len(samples[i].prompt) + samples[i].num_tokens, i))
