"""The policy being trained: forward and backward over micro-batches, the optimizer update, its state.

The model holds exactly the tensors that are published, in their dtype, and every forward pass uses them. Where that
dtype is not float32, float32 masters live in the optimizer: gradients are added up in float32, the update is made there
and rounded into the model. Sums run in the order of the micro-batches, so equal input gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.learn import attention, self_check
from offbeat.learn.finite import NotFinite
from offbeat.learn.forward import Forward, checkpoint_layers, forward
from offbeat.learn.packing import Microbatch
from offbeat.learn.value import ValueHead
from offbeat.model.lora import published_tensors


@dataclass(frozen=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


LossFunction = Callable[[Forward], Tensor]
"""From what the policy says of the targets to a scalar whose gradient is wanted."""


class Policy:
    """One model and its optimizer on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        adam: AdamSettings,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        has_value_head: bool = False,
    ):
        self.usage = attention.use(model)
        self.model, self.temperature, self.adam = model, temperature, adam
        self.device = next(model.parameters()).device
        self.num_threads = torch.get_num_threads()
        self.num_updates = 0
        """Updates begun since this object was made: whoever sees the same number twice has seen the same weights."""
        if gradient_checkpointing:
            checkpoint_layers(model)
        self.head = ValueHead(model) if has_value_head else None
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if self.head is not None:
            trained += [(f"value_head.{name}", p) for name, p in self.head.linear.named_parameters()]
        self.names, self.parameters = [name for name, _ in trained], [p for _, p in trained]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().clone() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=0.0,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_add_to(master))
        self_check.check(model, self.usage)

    def use_threads(self) -> None:
        """Takes all threads for the calling thread: it may be new, and start with whatever an engine last chose."""
        torch.set_num_threads(self.num_threads)

    @torch.no_grad()
    def logprobs(self, microbatch: Microbatch, model: PreTrainedModel | None = None) -> Tensor:
        """The targets' log-probs under this policy, or under another model that uses packed rows."""
        return forward(model or self.model, microbatch, self.temperature, self.usage).logprobs

    @torch.no_grad()
    def look(self, microbatch: Microbatch) -> Forward:
        """What the policy says as it is now."""
        return forward(self.model, microbatch, self.temperature, self.usage, self.head)

    def forward_backward(self, microbatch: Microbatch, loss: LossFunction) -> Tensor:
        """Adds one micro-batch's gradient; returns the targets' log-probs, detached."""
        found = forward(self.model, microbatch, self.temperature, self.usage, self.head)
        loss(found).backward()
        return found.logprobs.detach()

    def update(self, lr: float) -> float:
        """One optimizer update from the gradients gathered so far; returns their norm before clipping. A gradient that
        is not finite is refused: nothing is changed, and nothing of it is kept."""
        for master in self.masters:
            if master.grad is None:  # nothing was sent backward; momentum goes on all the same
                master.grad = torch.zeros_like(master)
        norm = torch.nn.utils.get_total_norm([master.grad for master in self.masters if master.grad is not None])
        if not norm.isfinite():  # looked at before clipping, which would spread NaN over all gradients
            wrong = [name for name, m in zip(self.names, self.masters, strict=True) if not _is_finite(m.grad)]
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"the gradient of {wrong[0] if wrong else 'all weights together'}")
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.adam.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.num_updates += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round_into_model()
        return float(norm)

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    @contextmanager
    def weights_of(self, file: Path) -> Iterator[None]:
        """Inside, the model has the weights of another version, as they were published in `file`: an adapter's, where
        it is one. Where masters lie apart from the model there is no second copy: its own weights are rounded from them
        once more."""
        pairs = zip(self.parameters, self.masters, strict=True)
        kept = [(parameter, parameter.detach().clone()) for parameter, master in pairs if master is parameter]
        own = published_tensors(self.model)
        try:
            with torch.no_grad(), safe_open(file, framework="pt") as stored:
                for name, tensor in own.items():
                    tensor.copy_(stored.get_tensor(name))
            yield
        finally:
            with torch.no_grad():
                for parameter, before in kept:
                    parameter.copy_(before)
            self._round_into_model()

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, for a checkpoint."""
        tensors = {}
        for name, master in zip(self.names, self.masters, strict=True):
            tensors[f"master.{name}"] = master.detach()
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state` gave, to the bit."""
        keys = sorted({key.split(".", 1)[0] for key in tensors} - {"master"})
        (group,) = self.optimizer.param_groups
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            saved = {key: tensors[f"{key}.{name}"] for key in keys if f"{key}.{name}" in tensors}
            if saved:  # one tensor after the other, so that no second copy of them all is ever held
                self.optimizer.state[master] = {
                    key: value.to(state_device(key, master, group), torch.float32, copy=True)
                    for key, value in saved.items()
                }
        self._round_into_model()


def state_device(key: str, master: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Device on which an optimizer with the options of `group` reads the state `key` of `master`.

    Moments lie with their master. The count of steps does so only where a kernel of the device reads it; the other
    kernels want a number of the CPU, and each refuses the other's.
    """
    return master.device if key != "step" or group["fused"] or group["capturable"] else torch.device("cpu")


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def _add_to(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
