"""A model's forward pass over a micro-batch: over its packed row, or over a row for each sample where a model cannot be
used so; with all activations kept, or layer by layer computed again on the way back."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.errors import UserError
from offbeat.learn.packing import Microbatch
from offbeat.learn.value import ValueHead
from offbeat.model.usage import Usage, kind_of


class Forward(NamedTuple):
    """What a forward pass says of every target of a micro-batch, in float32."""

    logprobs: Tensor
    """After temperature."""
    values: Tensor | None = None
    """What the value head expects before the token is chosen; None without a head."""


class Outputs(NamedTuple):
    """What a model says at the positions that predict something (`Microbatch.predict_from`)."""

    logits: Tensor
    values: Tensor | None


def outputs(model: PreTrainedModel, microbatch: Microbatch, usage: Usage, head: ValueHead | None = None) -> Outputs:
    """One forward pass over the packed row, or over a row for each sample where the model wants that."""
    if usage.packs:
        inputs = {
            "input_ids": microbatch.tokens[None],
            "position_ids": microbatch.positions[None],
            "layout": microbatch.layout,
        }
        return _at(model, inputs, microbatch.predict_from, usage, head, slice(None))
    # Where in the rows of all buckets, one after the other, each prediction is made.
    cells, start = microbatch.layout.restore[microbatch.predict_from], 0
    found, wanted = [], []
    for table in microbatch.layout.buckets:
        wanted.append(((cells >= start) & (cells < start + table.numel())).nonzero().squeeze(1))
        row, column = (cells[wanted[-1]] - start) // table.shape[1], (cells[wanted[-1]] - start) % table.shape[1]
        start += table.numel()
        columns, place = column.unique(return_inverse=True)
        inputs = {"input_ids": microbatch.tokens[table]}
        found.append(_at(model, inputs, columns, usage, head, row * len(columns) + place))
    back = torch.cat(wanted).argsort()
    values = None if head is None else torch.cat([one.values for one in found if one.values is not None])[back]
    return Outputs(torch.cat([one.logits for one in found])[back], values)


def _at(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    columns: Tensor,
    usage: Usage,
    head: ValueHead | None,
    cells: Tensor | slice,
) -> Outputs:
    """A forward pass, and of its rows' `columns`, flattened, the `cells` that are wanted."""
    options = {"logits_to_keep": columns} if usage.picks_logits else {}
    logits = model(**inputs, **options, use_cache=False).logits
    values = None if head is None else head.values()
    if not usage.picks_logits:
        logits, values = logits[:, columns], None if values is None else values[:, columns]
    return Outputs(logits.flatten(0, 1)[cells], None if values is None else values.flatten()[cells])


def forward(
    model: PreTrainedModel, microbatch: Microbatch, temperature: float, usage: Usage, head: ValueHead | None = None
) -> Forward:
    found = outputs(model, microbatch, usage, head)
    logits = found.logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits[microbatch.target_row, microbatch.targets]
    logprobs = chosen - torch.logsumexp(logits, dim=-1)[microbatch.target_row]
    return Forward(logprobs, None if found.values is None else found.values[microbatch.target_row])


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Has layers keep nothing but their inputs. The model stays in evaluation mode, out of which transformers' own
    switch would take it: that turns on dropout, a router's noise and whatever else of the kind a model has."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"model.gradient_checkpointing = true: {kind_of(model)} has no layers for it; set it to false")
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again
