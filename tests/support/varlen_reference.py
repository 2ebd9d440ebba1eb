"""Attention over sequences of uneven length, as torch's kernel on GPUs computes it."""

from __future__ import annotations

import torch


def attend_run_by_run(query, key, value, query_ends, key_ends, max_queries, max_keys, *, scale=None, window_size):
    """Computes one run of queries after the other; the arguments are those of torch's kernel."""
    found = []
    ends = zip(query_ends.tolist(), query_ends[1:].tolist(), key_ends.tolist(), key_ends[1:].tolist(), strict=False)
    for first, last, first_key, last_key in ends:
        q, k, v = query[first:last], key[first_key:last_key], value[first_key:last_key]
        assert len(q) <= max_queries
        assert len(k) <= max_keys
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        repeats = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * scale
        behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        hidden = (behind < 0) | ((behind > window_size[0]) if window_size[0] >= 0 else False)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)))
    return torch.cat(found)
