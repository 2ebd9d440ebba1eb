"""Forward pass of a decode step: the model itself, or a recording that replays its kernels without Python.

With a small model or few rows, most of a step's time is spent in Python. A recording is two to three times as fast and
gives the same bits. It is used only on a CPU, and only under two conditions. While traced, the model's code did not
branch on values or sizes (torch warns of such branches). And the recording gives the same bits as the model on inputs
of other sizes. A recording reads weights and KV in place, so both may change.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.engines.embedded.attention import KeyValueSlots, short_context

log = logging.getLogger(__name__)

TORCH = str(Path(torch.__file__).parent)
ERROR_CHARACTERS = 300
"""Number of characters of an error to log; the whole text may include a tensor."""
Forward = Callable[..., Tensor]
"""Function that returns the logits of a decode step. `Recomputed` takes tokens and positions. Other functions take
tokens (rows, 1), positions (rows,), the mask (rows, 1, 1, read tokens), all layers' keys, and all layers' values. If
the last rows read a shorter context, their mask follows the first mask."""

_recording = threading.Lock()
"""Lock to hold while recording. Warnings are caught for the whole process, so two engines must not record at once."""


class DecodeForward:
    """Runs a decode step of the first KV slots. If `num_parts` is 2, the last rows read a shorter context than the
    others."""

    def __init__(self, model: PreTrainedModel, num_parts: int = 1):
        self.model, self.num_parts = model, num_parts

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
        """Returns the logits of each row's next token. The last dimension of `mask` is the number of context tokens to
        read. `rest` is the shorter mask (only with two parts), then all layers' keys, then all layers' values."""
        short, held = (None, rest) if self.num_parts == 1 else (rest[0], rest[1:])
        num_layers, (num_slots, _, context, _) = len(held) // 2, held[0].shape
        slots = KeyValueSlots(num_slots, context, keys=held[:num_layers], values=held[num_layers:])
        slots.begin_decode(positions, mask.shape[-1])
        with short_context(short):
            logits: Tensor = self.model(
                input_ids=tokens,
                position_ids=positions.unsqueeze(1),
                attention_mask=mask,
                past_key_values=slots,
                use_cache=True,
            ).logits[:, -1]
        return logits


class RecordedStep:
    """A recording (traced graph) of `DecodeForward`. Weights are inputs to it, so they may change after recording."""

    def __init__(self, forward: DecodeForward, inputs: tuple[Tensor, ...]):
        from torch.nn.utils.stateless import _reparametrize_module  # the public functional_call refuses tracing

        model = forward.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names, self.weights = list(state), [tensor.detach() for tensor in state.values()]

        def decode(*values: Tensor) -> Tensor:
            with _reparametrize_module(model, dict(zip(names, values, strict=False)), tie_weights=True):
                return forward(*values[len(names) :])

        self.graph = torch.jit.trace(decode, (*self.weights, *inputs), check_trace=False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        with torch.jit.optimized_execution(False):  # optimising takes a second and makes no step faster
            logits: Tensor = self.graph(*self.weights, *inputs)
        return logits


def recorded(forward: DecodeForward, inputs: Sequence[tuple[Tensor, ...]]) -> Forward:
    """Records `forward` with the first of `inputs`, and compares the recording's logits with those of `forward` on the
    others. Returns the recording, or else `forward` if it is not on a CPU, cannot be recorded, or gives other
    logits."""
    if inputs[0][0].device.type != "cpu":
        return forward
    with _recording, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            replay = RecordedStep(forward, inputs[0])
            agrees = all(torch.equal(forward(*some), replay(*some)) for some in inputs[1:])
        except Exception as error:  # noqa: BLE001 - a model that cannot be recorded can still run
            _warn(str(error))
            return forward
    frozen = [warning for warning in caught if _freezes_a_branch(warning)]
    if frozen or not agrees:
        why = (
            f"{frozen[0].filename}:{frozen[0].lineno}: {frozen[0].message}"
            if frozen
            else "a recording gives other logits"
        )
        _warn(why)
        return forward
    return replay


@cache
def _warn(why: str) -> None:
    """Logs why steps cannot be recorded. Each reason is logged once, however many engines the process has."""
    log.warning(
        "embedded engine: decode steps are slower, because they cannot be recorded: %s",
        " ".join(why.split())[:ERROR_CHARACTERS],
    )


def recorded_in_parts(model: PreTrainedModel, inputs: Sequence[tuple[Tensor, ...]]) -> Forward:
    """Returns a recording of a decode step whose last rows read a shorter context. Only the entries of `inputs` with
    several rows are used for it; in them, the last row reads half the context. If there is no such entry, or recording
    fails, returns the step itself, unrecorded."""
    forward = DecodeForward(model, num_parts=2)
    # Recording writes keys and values, so it gets copies of the slots.
    halved = [
        (tokens, positions % (mask.shape[-1] // 2), mask, mask[-1:, :, :, : mask.shape[-1] // 2], *copies)
        for tokens, positions, mask, *held in inputs
        if len(tokens) > 1 and (copies := [one[: len(tokens)].clone() for one in held])
    ]
    return recorded(forward, halved) if halved else forward


def inputs_of_all_sizes(
    model: PreTrainedModel, kv: KeyValueSlots, max_context_tokens: int, bucket_tokens: int
) -> list[tuple[Tensor, ...]]:
    """Returns made-up inputs of decode steps, with different numbers of rows and context lengths, for recording."""
    few, more, device = min(2, kv.num_slots), min(8, kv.num_slots), kv.keys[0].device
    vocab, inputs = model.config.get_text_config().vocab_size, []
    sizes = ((few, bucket_tokens), (1, bucket_tokens), (more, min(2 * bucket_tokens, kv.max_context_tokens)))
    for num_rows, read_tokens in sizes:
        number = torch.arange(num_rows, device=device)
        positions = number % max_context_tokens % read_tokens
        tokens = (number * 7 % vocab).unsqueeze(1)
        hidden = torch.arange(read_tokens, device=device) > positions.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        inputs.append((tokens, positions, mask, *kv.keys, *kv.values))
    return inputs


def _freezes_a_branch(warning: warnings.WarningMessage) -> bool:
    """Whether `warning` says that the model's code branched on a tensor, so that a trace would always take the same
    branch. Warnings about torch's own code do not count: it branches only to check the sizes of weights."""
    return issubclass(warning.category, torch.jit.TracerWarning) and not warning.filename.startswith(TORCH)


class Recomputed:
    """Decode step of a model whose attention cannot be replaced: computes every row from its first token on.

    Nothing is cached between steps, so this works for any kind of state that a model has, such as a recurrent one. The
    cost grows with the length of the rows. With `picks_logits`, logits are computed only at the positions that any row
    of the batch needs.
    """

    def __init__(self, model: PreTrainedModel, picks_logits: bool):
        self.model, self.picks_logits = model, picks_logits

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits after the token at each row's position; later tokens of the row have no effect."""
        rows = torch.arange(len(tokens), device=tokens.device)
        if not self.picks_logits:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[rows, positions]
            return logits
        columns, inverse = positions.unique(return_inverse=True)
        picked: Tensor = self.model(input_ids=tokens, use_cache=False, logits_to_keep=columns).logits[rows, inverse]
        return picked


# A few rows times a large weight, on a CPU

MIN_ROWS, MAX_ROWS = 4, 48
"""Limits of the number of rows for which `product` does not use `F.linear`. MKL computes `values @ weight.T` for 4 to
48 rows by a kernel that reads the weight slowly; `weight @ values.T` reads it faster. Two cores need 52 instead of 85
ms for the products of a 135M model with 8 rows, and 53 instead of 136 ms with 16. For fewer and for more rows the usual
order is faster."""
MAX_BLOCKED_ROWS, BLOCK = 12, 64
"""Largest number of rows for which `product` multiplies with `BLOCK` rows of the weight at a time. Such small products
have kernels that read the weight in place. With 4 rows they take two thirds of the time of `weight @ values.T`, with 8
rows five sixths, and with 12 rows still a little less."""
MIN_ELEMENTS = 1 << 16
"""Smallest number of elements of a weight for which `product` is used; smaller weights fit into the cache of a core."""


def product(
    values: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    min_rows: int = MIN_ROWS,
    max_rows: int = MAX_ROWS,
    max_blocked_rows: int = MAX_BLOCKED_ROWS,
    block: int = BLOCK,
) -> Tensor:
    """Returns `F.linear(values, weight, bias)`. It is computed in another way if `values` has the shape of a decode
    step, (rows, 1, features), and `min_rows` to `max_rows` rows. Up to `max_blocked_rows` rows, that is in blocks of
    `block` outputs; otherwise, as `weight @ values.T`, which is then transposed."""
    num_rows = values.size(0)
    if values.dim() != 3 or values.size(1) != 1 or num_rows < min_rows or num_rows > max_rows:
        return F.linear(values, weight, bias)
    rows = values.squeeze(1)
    if num_rows <= max_blocked_rows and weight.size(0) % block == 0:
        blocks = weight.unflatten(0, [-1, block]).transpose(1, 2)
        found = torch.bmm(rows.expand(blocks.size(0), -1, -1), blocks).transpose(0, 1).reshape(num_rows, -1)
    else:
        found = torch.mm(weight, rows.t()).t().contiguous()
    if bias is not None:
        found = found + bias
    return found.unsqueeze(1)


@cache
def _scripted() -> Any:
    return torch.jit.script(product)  # so that a traced decode step decides anew for each number of rows


def use_few_rows(model: PreTrainedModel) -> None:
    """Makes the model's large float32 layers use `product` where that is faster: on a CPU with MKL."""
    if not torch.backends.mkl.is_available():
        return
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.numel() < MIN_ELEMENTS:
            continue
        if layer.weight.dtype is torch.float32 and layer.weight.device.type == "cpu":
            layer.forward = MethodType(_few_rows_forward, layer)  # type: ignore[method-assign]


def _few_rows_forward(layer: nn.Linear, values: Tensor) -> Tensor:
    found: Tensor = _scripted()(values, layer.weight, layer.bias)
    return found
