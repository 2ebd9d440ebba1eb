"""Attention over a packed row against the formula, head by head and token by token."""

import math

import numpy as np
import pytest
import torch

from offbeat.trainer.attention import SHORT_TOKENS, packed_attention
from offbeat.trainer.packing import RowLayout

HEADS, KV_HEADS, DIM = 4, 2, 8


def by_the_formula(query, key, value, softcap, sinks):
    """Softmax over all earlier tokens and, where there is one, a sink that takes its share and gives nothing."""
    out = torch.zeros(query.shape[1], HEADS, DIM)
    for head in range(HEADS):
        of_kv = head // (HEADS // KV_HEADS)
        for at in range(query.shape[1]):
            scores = key[of_kv, : at + 1] @ query[head, at] / math.sqrt(DIM)
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            shares = scores.exp()
            total = shares.sum() + (0.0 if sinks is None else sinks[head].exp())
            out[at, head] = (shares[:, None] * value[of_kv, : at + 1]).sum(0) / total
    return out


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("length", [1, 9, SHORT_TOKENS + 1])
def test_two_sequences_of_a_row_attend_each_to_itself(length, softcap, has_sinks):
    torch.manual_seed(0)
    row = 2 * length
    query, key, value = (torch.randn(heads, row, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    sinks = torch.randn(HEADS) if has_sinks else None
    sequences = np.arange(row).reshape(2, length)
    layout = RowLayout(sequences, [(length, own) for own in sequences], torch.device("cpu"))
    found, _ = packed_attention(
        torch.nn.Module(), query[None], key[None], value[None], None, layout=layout, softcap=softcap, s_aux=sinks
    )
    for start in (0, length):
        own = slice(start, start + length)
        expected = by_the_formula(query[:, own], key[:, own], value[:, own], softcap, sinks)
        torch.testing.assert_close(found[0, own].reshape(length, HEADS, DIM), expected, rtol=1e-5, atol=1e-5)
