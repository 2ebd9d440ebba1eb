"""The policy being trained: forward and backward passes over micro-batches, optimizer updates, and state to save.

The model holds exactly the tensors that are published, in their dtype, and every forward pass uses them. If that dtype
is not float32, the optimizer holds float32 copies, the masters: gradients are added up in float32, updates change the
masters, and the masters are rounded into the model. Gradients are added up in the order of the micro-batches, so that
equal input gives equal bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from offbeat.errors import UserError
from offbeat.model.devices import recording_lock
from offbeat.model.lora import AdapterDisabled, published_tensors
from offbeat.model.usage import (
    Usage,
    distance,
    kind_of,
    max_distance,
    one_line_errors,
    own_logits,
    probe_tokens,
    without_random,
)
from offbeat.trainer.attention import use_packed_attention
from offbeat.trainer.compiling import compile_layers, layers_of, uncompiled, undo_compile
from offbeat.trainer.even_adamw import EvenAdamW
from offbeat.trainer.host_adamw import HostAdamW
from offbeat.trainer.norm import norm_of, row_squares
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.output_head import OutputHead, exceeds_chunk
from offbeat.trainer.packing import Microbatch, Sample, pack
from offbeat.trainer.rounds import ALONE, Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class Forward(NamedTuple):
    """Result of a forward pass: one float32 number for each target (token to predict) of a micro-batch."""

    logprobs: Tensor
    """Log-probs of the targets, after temperature."""
    values: Tensor | None = None
    """Value head's estimate at the position that predicts each target; None without a value head."""


MAX_NORM = torch.finfo(torch.float32).max
LossFunction = Callable[[Forward], Tensor]
"""Function from the result of a micro-batch's forward pass to the scalar loss whose gradient is accumulated."""


class Policy:
    """The model being trained and its optimizer, on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        adam: AdamSettings,
        temperature: float = 1.0,
        gradient_checkpointing: bool | float = False,
        has_value_head: bool = False,
        compiles: bool = False,
        moments_on_host: bool = False,
        exact: bool = False,
    ):
        """`gradient_checkpointing` is True for all layers, or the share of layers to checkpoint. `moments_on_host`
        keeps AdamW's moments in host memory, but for those that the GPU has room for, and computes updates on the GPU.
        With `compiles`, layers are compiled, unless this fails on this machine or `TORCHDYNAMO_DISABLE=1` is set. With
        `exact`, each micro-batch's gradient is complete before it is added to the others, and the norm is summed row by
        row, as on several ranks."""
        self.usage = use_packed_attention(model)
        self.drop_gathered(model)
        self.model, self.temperature, self.adam, self.exact = model, temperature, adam, exact
        self.device = next(model.parameters()).device
        self.width: int = model.config.get_text_config().hidden_size
        """Length of a hidden state, in numbers."""
        self.num_threads = torch.get_num_threads()
        self.num_updates = 0
        """Number of optimizer updates begun since this object was made. If a failed step began none, the weights are
        still those before the step."""
        self.head = ValueHead(model) if has_value_head else None
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if self.head is not None:
            trained += [(f"value_head.{name}", p) for name, p in self.head.linear.named_parameters()]
        self.names, self.parameters = [name for name, _ in trained], [p for _, p in trained]
        self.masters = self._make_masters()
        is_even = exact and self.device.type == "cpu"
        self.optimizer = (HostAdamW if moments_on_host else EvenAdamW if is_even else torch.optim.AdamW)(
            self.masters,
            lr=0.0,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self._outputs: dict[int, OutputHead | None] = {}
        self.is_compiled = compiles and compile_layers(model)
        checkpoint_layers(model, float(gradient_checkpointing))
        try:
            check_forward(model, self.usage, self.is_compiled)
        except UserError as error:
            if not self.is_compiled:
                raise
            log.warning("layers cannot be compiled here, so training is slower: %s", error)
            undo_compile(model)
            self.is_compiled = False
            checkpoint_layers(model, float(gradient_checkpointing))
            check_forward(model, self.usage)
        self.drop_gathered(model)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train this policy together."""
        return ALONE

    @cached_property
    def published(self) -> Mapping[str, Tensor]:
        """The tensors that make up a version, by name; training changes them in place."""
        return published_tensors(self.model)

    def drop_gathered(self, model: PreTrainedModel) -> None:
        """Frees weights that a pass without gradients has gathered from other ranks; an update would outdate them."""

    def _make_masters(self) -> list[Tensor]:
        """Returns, for each trained parameter, the float32 tensor that the optimizer changes; from now on it also gets
        the parameter's gradients."""
        masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for parameter, master in zip(self.parameters, masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_add_to(master))
        return masters

    def use_threads(self) -> None:
        """Lets torch use as many threads as when this policy was made; an embedded engine may have set fewer."""
        torch.set_num_threads(self.num_threads)

    @torch.no_grad()
    def logprobs(self, microbatch: Microbatch, model: PreTrainedModel | None = None) -> Tensor:
        """Returns the targets' log-probs, without gradients, under `model` (same architecture); None: the policy's."""
        model = model or self.model
        with recording_lock:
            output = self._output_head(model, microbatch)
            return forward(model, microbatch, self.temperature, self.usage, output=output).logprobs

    @torch.no_grad()
    def infer(self, microbatch: Microbatch) -> Forward:
        """Runs a forward pass without gradients; returns log-probs and, with a value head, values."""
        with recording_lock:
            return self._forward(microbatch)

    def forward_backward(self, microbatch: Microbatch, loss: LossFunction, num_real: int = 1) -> Tensor:
        """Accumulates the gradient of one micro-batch's loss; returns the targets' log-probs, detached. `num_real` is
        the number of ranks with a micro-batch in this round (`offbeat.trainer.rounds.Turn`)."""
        with recording_lock:
            found = self._forward(microbatch)
            with self._adding_whole_gradients():
                loss(found).backward()
        return found.logprobs.detach()

    @contextmanager
    def _adding_whole_gradients(self) -> Iterator[None]:
        """With `exact`, adds the output layer's gradient to earlier ones only when the block ends. Otherwise its chunks
        would be added one by one, which rounds differently from adding their sum."""
        outputs = [output.layer for output in self._outputs.values() if output is not None and self.exact]
        chunked = {id(parameter) for layer in outputs for parameter in layer.parameters()}
        pairs = zip(self.parameters, self.masters, strict=True)
        held = [(master, master.grad) for parameter, master in pairs if id(parameter) in chunked]
        for master, _ in held:
            master.grad = None
        yield
        for master, earlier in held:
            if earlier is not None:
                master.grad = earlier if master.grad is None else earlier.add_(master.grad)

    def _forward(self, microbatch: Microbatch) -> Forward:
        output = self._output_head(self.model, microbatch)
        return forward(self.model, microbatch, self.temperature, self.usage, self.head, output)

    def _output_head(self, model: PreTrainedModel, microbatch: Microbatch) -> OutputHead | None:
        """Returns the output head that computes the micro-batch's logits in chunks; None: compute them all at once."""
        model = model.model if isinstance(model, AdapterDisabled) else model
        vocabulary = model.config.get_text_config().vocab_size
        if not exceeds_chunk(len(microbatch.targets), vocabulary):
            return None
        if id(model) not in self._outputs:
            self._outputs[id(model)] = self._find_output_head(model)
        return self._outputs[id(model)]

    def _find_output_head(self, model: PreTrainedModel) -> OutputHead | None:
        tokens = torch.tensor(probe_tokens(model, 5), device=self.device)[None]
        with uncompiled(self.is_compiled), without_random(model):
            found = OutputHead.of(model, tokens)
        if found is None:
            log.warning("%s: logits cannot be computed in chunks, so training takes more memory", kind_of(model))
            return None
        masters = {id(p): master for p, master in zip(self.parameters, self.masters, strict=True)}
        found.gradient_of, found.fuses = lambda weight: masters.get(id(weight)), self.is_compiled
        return found

    def update(self, lr: float) -> float:
        """Makes one optimizer update from the accumulated gradients and drops them; returns their norm before clipping.
        If a gradient is not finite, drops the gradients and raises `NotFinite`, and the weights do not change."""
        for master in self.masters:
            if master.grad is None:  # without a backward pass, momentum still moves the weights
                master.grad = torch.zeros_like(master)
        norm, are_finite = self._norm()
        if not norm <= MAX_NORM:  # checked before clipping, which would spread NaN over all gradients
            wrong = [name for name, is_finite in zip(self.names, are_finite, strict=True) if not is_finite]
            self.drop_gradients()
            raise NotFinite(f"the gradient of {wrong[0] if wrong else 'all weights together'}")
        torch._foreach_mul_(self._gradients(), min(self.adam.max_grad_norm / (norm + 1e-6), 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.num_updates += 1
        self.optimizer.step()
        self.drop_gradients()
        self._round_into_model()
        return norm

    def _norm(self) -> tuple[float, Iterator[bool]]:
        """Returns the norm of the whole gradient, and for each master whether its own gradient is finite. Only with
        `exact` or several ranks is the norm summed row by row, which takes longer."""
        if not self.exact and self.ranks.size == 1:
            gradients = self._gradients()
            norm = float(torch.nn.utils.get_total_norm(gradients))
            return norm, (bool(gradient.isfinite().all()) for gradient in gradients)
        squares = self._row_squares()
        return norm_of(squares), (bool(np.isfinite(own).all()) for own in squares)

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters if master.grad is not None]

    def _row_squares(self) -> list[np.ndarray]:
        """Returns, for each master, the sums of squares of its gradient's rows."""
        found = [row_squares(gradient) for gradient in self._gradients()]
        ends = np.cumsum([len(rows) for rows in found])[:-1]
        return np.split(torch.cat(found).cpu().numpy(), ends)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def make_room(self) -> bool:
        """Moves moments that `HostAdamW` has moved to the GPU back to host memory; returns whether there were any."""
        return isinstance(self.optimizer, HostAdamW) and self.optimizer.move_to_host()

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    @contextmanager
    def weights_of(self, file: Path) -> Iterator[None]:
        """Gives the model the weights of another version, read from `file`, until the block ends. Then the model's own
        weights are restored: from the masters or, for weights without a separate master, from a copy."""
        pairs = zip(self.parameters, self.masters, strict=True)
        kept = [(parameter, parameter.detach().clone()) for parameter, master in pairs if master is parameter]
        try:
            with torch.no_grad(), safe_open(file, framework="pt") as stored:
                for name, tensor in self.published.items():
                    tensor.copy_(stored.get_tensor(name))
            yield
        finally:
            with torch.no_grad():
                for parameter, before in kept:
                    parameter.copy_(before)
            self._round_into_model()

    def state(self) -> dict[str, Tensor]:
        """Returns the masters (float32 weights) and the optimizer's state by name, for a checkpoint."""
        tensors = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"master.{name}"] = master.detach()
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Sets masters, optimizer state and model to the tensors that `state` returned, to the bit."""
        keys = sorted({key.split(".", 1)[0] for key in tensors} - {"master"})
        (group,) = self.optimizer.param_groups
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            saved = {key: tensors[f"{key}.{name}"] for key in keys if f"{key}.{name}" in tensors}
            if saved:  # one tensor at a time, so that a second copy of all never exists
                held = self.optimizer.state[master]
                if isinstance(self.optimizer, HostAdamW):
                    self.optimizer.new_state(master)
                for key, value in saved.items():
                    if key in held:
                        held[key].copy_(value)
                    else:
                        held[key] = value.to(state_device(key, master, group), torch.float32, copy=True)
        self._round_into_model()


def state_device(key: str, master: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Returns the device on which an optimizer with the options in `group` needs the state `key` of `master`.

    Moments must be on the device of their master. So must the step count for fused and capturable kernels; all other
    kernels need the step count on the CPU. Torch raises an error for the wrong device.
    """
    return master.device if key != "step" or group["fused"] or group["capturable"] else torch.device("cpu")


def _add_to(master: Tensor) -> Callable[[Tensor], None]:
    """Returns a hook that moves a parameter's gradient, in float32, into the gradient of `master`, its float32 copy."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)  # rounds nothing: the sum is computed in float32
        parameter.grad = None

    return hook


def learning_rate(step: int, lr: float, schedule: str, warmup_steps: int, num_steps: int) -> float:
    """Returns the learning rate at `step`. It rises linearly to `lr` over `warmup_steps`. Then it is constant, or falls
    to 0 at `num_steps` in a linear or cosine decay, as `schedule` says."""
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    if schedule == "constant":
        return lr
    if schedule == "linear":
        return lr * (1 - done)
    assert schedule == "cosine", f"this is a bug: unknown learning rate schedule {schedule!r}"
    return lr * 0.5 * (1 + math.cos(math.pi * done))


def forward(
    model: PreTrainedModel,
    microbatch: Microbatch,
    temperature: float,
    usage: Usage,
    head: ValueHead | None = None,
    output: OutputHead | None = None,
) -> Forward:
    """Runs the model over a micro-batch. With `output`, logits are computed in chunks; None: all at once."""
    found = outputs(model, microbatch, usage, head, output)
    rows = microbatch.target_row
    values = None if found.values is None else found.values[rows]
    if output is not None:
        return Forward(output.logprobs(found.rows, rows, microbatch.targets, temperature), values)
    logits = found.rows.float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits[rows, microbatch.targets]
    return Forward(chosen - torch.logsumexp(logits, dim=-1)[rows], values)


class Outputs(NamedTuple):
    """Outputs of the model at the row positions `Microbatch.predict_from`."""

    rows: Tensor
    """Logits; if these are to be computed in chunks, the inputs of the output layer instead."""
    values: Tensor | None
    """Values of the value head; None without one."""


def outputs(
    model: PreTrainedModel,
    microbatch: Microbatch,
    usage: Usage,
    head: ValueHead | None = None,
    output: OutputHead | None = None,
) -> Outputs:
    """Runs the model over a micro-batch's packed row if `usage.packs`, otherwise over one padded row per sample."""
    run = partial(_at, model, usage=usage, head=head, output=output)
    if usage.packs:
        inputs = {
            "input_ids": microbatch.tokens[None],
            "position_ids": microbatch.positions[None],
            "layout": microbatch.layout,
        }
        return run(inputs, microbatch.predict_from, cells=slice(None))
    # Index of each prediction in the concatenated rows of all buckets.
    cells, start = microbatch.layout.restore[microbatch.predict_from], 0
    found, wanted = [], []
    for table in microbatch.layout.buckets:
        wanted.append(((cells >= start) & (cells < start + table.numel())).nonzero().squeeze(1))
        row, column = (cells[wanted[-1]] - start) // table.shape[1], (cells[wanted[-1]] - start) % table.shape[1]
        start += table.numel()
        columns, inverse = column.unique(return_inverse=True)
        inputs = {"input_ids": microbatch.tokens[table]}
        found.append(run(inputs, columns, cells=row * len(columns) + inverse))
    back = torch.cat(wanted).argsort()
    values = None if head is None else torch.cat([one.values for one in found if one.values is not None])[back]
    return Outputs(torch.cat([one.rows for one in found])[back], values)


def _at(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    columns: Tensor,
    *,
    cells: Tensor | slice,
    usage: Usage,
    head: ValueHead | None,
    output: OutputHead | None,
) -> Outputs:
    """Runs the model and returns its outputs at chosen positions. The outputs at `columns` of every row are joined, row
    after row; `cells` holds the indices, into the joined outputs, of those to return."""
    options = {"logits_to_keep": columns} if usage.picks_logits else {}
    deferred: AbstractContextManager[list[Tensor]] = nullcontext([]) if output is None else output.deferred()
    with deferred as hidden:
        logits = model(**inputs, **options, use_cache=False).logits
    rows = hidden[0] if hidden else logits
    values = None if head is None else head.values()
    if not usage.picks_logits:
        rows, values = rows[:, columns], None if values is None else values[:, columns]
    return Outputs(rows.flatten(0, 1)[cells], None if values is None else values.flatten()[cells])


class ValueHead:
    """Linear layer that predicts the expected reward at each token from the input of the model's output layer.

    It starts at 0 and is saved in checkpoints. It is not part of a version, because engines do not need it.
    """

    def __init__(self, model: PreTrainedModel):
        output = model.get_output_embeddings()
        if output is None:
            raise UserError(
                f'loss.advantage = "gae" needs a model with an output layer, but {type(model).__name__} has none; '
                "choose another advantage"
            )
        self.linear = torch.nn.Linear(output.weight.shape[1], 1, device=output.weight.device)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)
        self._hidden: Tensor | None = None
        output.register_forward_pre_hook(self._record)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._hidden = args[0]

    def values(self) -> Tensor:
        """Returns the values at the positions whose logits the last forward pass computed; call once per pass."""
        assert self._hidden is not None, "this is a bug: values were asked for, but there was no forward pass"
        hidden, self._hidden = self._hidden, None  # frees the activations
        return self.linear(hidden.float()).squeeze(-1)


def checkpoint_layers(model: PreTrainedModel, share: float) -> None:
    """Turns on gradient checkpointing for a share of the layers, evenly spread; a checkpointed layer keeps only its
    inputs for the backward pass. transformers' own switch is not used, because it needs training mode, which would turn
    on dropout and router noise."""
    layers = layers_of(model)
    if share and not layers:
        raise UserError(f"model.gradient_checkpointing: {kind_of(model)} does not support it; set it to false")
    for i, layer in enumerate(layers):
        if int((i + 1) * share) > int(i * share):
            again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
            layer.forward = again


def check_forward(model: PreTrainedModel, usage: Usage, is_compiled: bool = False) -> None:
    """Raises a `UserError` if a sample's log-probs depend on the rest of its micro-batch, or if the backward pass
    fails.

    Three short samples go together through a forward and backward pass. Two of them also go alone through transformers'
    own forward pass, for comparison: one that shares its prompt with another sample, and one that does not.
    """
    samples = _samples(model)
    with recording_lock, one_line_errors(model, "a forward and backward pass"), without_random(model):
        batch = pack(samples, range(len(samples)), model.device)
        logits = _forward_backward(model, batch, usage)[batch.target_row]
        together = logits.split([sample.num_tokens for sample in samples])
        for sample, found in list(zip(samples, together, strict=True))[1:]:
            tokens = np.concatenate([sample.prompt, sample.response[:-1]])
            with torch.no_grad(), uncompiled(is_compiled):
                alone = own_logits(model, torch.as_tensor(tokens, device=model.device)[None])
            gap, allowed = distance(found, alone[0, len(sample.prompt) - 1 :]), max_distance(found)
            if gap is not None and not gap <= allowed:
                raise UserError(
                    f"model.path: {kind_of(model)}: in a micro-batch with others, a sample's log-probs differ by "
                    f"{gap:.2g} standard deviations from those of the sample alone (allowed {allowed:g}), so the model "
                    "cannot be trained; take a model that docs/models.md lists"
                )


def _forward_backward(model: PreTrainedModel, batch: Microbatch, usage: Usage) -> Tensor:
    """Runs a forward and a backward pass, and returns the logits. The backward pass ends at the embedded tokens: no
    weight gets a gradient, which would take memory."""
    embedded: list[Tensor] = []

    def cut_graph(module: nn.Module, args: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models write to it in place, which torch does not allow for a leaf

    hook = model.get_input_embeddings().register_forward_hook(cut_graph)
    try:
        with torch.enable_grad():
            logits = outputs(model, batch, usage).rows
            torch.autograd.grad(logits.sum(), embedded, allow_unused=True)
    finally:
        hook.remove()
    return logits.detach()


def _samples(model: PreTrainedModel) -> list[Sample]:
    """Returns three samples: two share a prompt, and the third has a prompt of one token. Their lengths are so similar
    that a model that needs padding gets all three in one padded batch."""
    tokens = np.array(probe_tokens(model, 17))
    prompt, others = tokens[:3], np.split(tokens[3:], (5, 8, 9))
    return [_sample(0, prompt, others[0]), _sample(0, prompt, others[1]), _sample(1, others[2], others[3])]


def _sample(group: int, prompt: np.ndarray, response: np.ndarray) -> Sample:
    """Returns a sample with reward 0, all of whose tokens are trained on."""
    return Sample(group, prompt, response, np.zeros(len(response), np.float32), np.ones(len(response), bool), 0.0)
