"""The forward pass of a decode step, recorded once and then replayed without Python between its kernels.

With a small model or few live rows most of a step is Python: replaying is two to three times as fast, to the same bits.
A recording is used only where it is sure to be the model: on a CPU, where nothing in the model's own code looked at
values or sizes while it was recorded (torch warns of that: such a branch would be frozen), and where it agrees with the
model on other sizes. Everywhere else the model itself is called.

Weights and KV are read where they lie, so both may change under a recording.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.rollout.engines.embedded.attention import read_less
from offbeat.rollout.engines.embedded.slots import KeyValueSlots

log = logging.getLogger(__name__)

TORCH = str(Path(torch.__file__).parent)
ERROR_CHARACTERS = 300
"""Of an error's text, which may hold a whole tensor."""
Forward = Callable[..., Tensor]
"""From tokens (rows, 1), positions (rows,), mask (rows, 1, 1, read tokens), a mask of the last rows where those
are read less far, and all keys and values to logits."""

_recording = threading.Lock()
"""How warnings are told belongs to the process: engines of two runs that record at a time would hear each other's."""


class DecodeForward:
    """One new token for each of the first slots, by the model itself; in two parts, one of which reads less far."""

    def __init__(self, model: PreTrainedModel, num_parts: int = 1):
        self.model, self.num_parts = model, num_parts

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, *rest: Tensor) -> Tensor:
        if self.num_parts == 1:
            return _decode(self.model, tokens, positions, mask, *rest)
        with read_less(rest[0]):
            return _decode(self.model, tokens, positions, mask, *rest[1:])


class Replay:
    """A recording of the same. Weights are inputs too, so that nothing is computed from them ahead of time."""

    def __init__(self, forward: DecodeForward, inputs: tuple[Tensor, ...]):
        from torch.nn.utils.stateless import _reparametrize_module  # functional_call, its public face, refuses tracing

        model = forward.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names, self.weights = list(state), [tensor.detach() for tensor in state.values()]

        def decode(*values: Tensor) -> Tensor:
            with _reparametrize_module(model, dict(zip(names, values, strict=False)), tie_weights=True):
                return forward(*values[len(names) :])

        self.graph = torch.jit.trace(decode, (*self.weights, *inputs), check_trace=False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = self.graph(*self.weights, *inputs)
        return logits


def _decode(model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: Tensor, *held: Tensor) -> Tensor:
    """Logits of each row's next token; reads as many tokens of each slot as the mask has."""
    num_layers = len(held) // 2
    num_slots, _, context, _ = held[0].shape
    slots = KeyValueSlots(num_slots, context, keys=held[:num_layers], values=held[num_layers:])
    slots.begin_decode(positions, mask.shape[-1])
    logits: Tensor = model(
        input_ids=tokens,
        position_ids=positions.unsqueeze(1),
        attention_mask=mask,
        past_key_values=slots,
        use_cache=True,
    ).logits[:, -1]
    return logits


def recorded(forward: DecodeForward, inputs: Sequence[tuple[Tensor, ...]]) -> Forward:
    """A recording made with the first inputs and compared on all of them, or `forward` itself."""
    if inputs[0][0].device.type != "cpu":
        return forward
    with _recording, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            replay = Replay(forward, inputs[0])
            agrees = all(torch.equal(forward(*some), replay(*some)) for some in inputs)
        except Exception as error:  # noqa: BLE001 - whatever a model does that cannot be recorded, it still runs
            log.debug("decode step not recorded: %s", str(error)[:ERROR_CHARACTERS])
            return forward
    frozen = [warning for warning in told if _freezes_a_branch(warning)]
    if frozen or not agrees:
        why = f"{frozen[0].filename}:{frozen[0].lineno}: {frozen[0].message}" if frozen else "it differs from the model"
        log.debug("decode step not recorded: %s", why)
        return forward
    return replay


def recorded_in_parts(model: PreTrainedModel, inputs: Sequence[tuple[Tensor, ...]]) -> Forward:
    """The step in two parts, from inputs of the whole one: the last row is a part by itself and reads half as far."""
    forward = DecodeForward(model, num_parts=2)
    # Recording writes keys and values, so that it gets copies: slots are live by now.
    halved = [
        (tokens, positions % (mask.shape[-1] // 2), mask, mask[-1:, :, :, : mask.shape[-1] // 2], *copies)
        for tokens, positions, mask, *held in inputs
        if len(tokens) > 1 and (copies := [one[: len(tokens)].clone() for one in held])
    ]
    return recorded(forward, halved) if halved else forward


def inputs_of_all_sizes(
    model: PreTrainedModel, kv: KeyValueSlots, max_context_tokens: int, bucket_tokens: int
) -> list[tuple[Tensor, ...]]:
    """Inputs that differ in whatever may differ between two steps, for a recording to be compared on."""
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
    """Torch's own functions are left out: they look at the sizes of weights, which do not change, to check them."""
    return issubclass(warning.category, torch.jit.TracerWarning) and not warning.filename.startswith(TORCH)
