"""The policy divided among ranks by FSDP2: every rank holds some rows of each tensor, and all take part in each pass.

The float32 masters are the sharded weights themselves; a layer's weights in the published dtype exist only while the
layer is gathered, and are the masters rounded, as in `Policy`. Units are the decoder layers, and the rest of the model:
embeddings, final norm and output layer, which stay gathered during a pass, because log-probs are computed in chunks
from the output layer's weights outside of the model's own forward pass.

Gradients are sums, never averages. With `exact` they are added in the order of the micro-batches, for any number of
ranks (`offbeat.trainer.ordered`). The value head is small: every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.errors import UserError
from offbeat.model.loading import state_tensors, stored_weights, tied_names
from offbeat.model.lora import AdapterDisabled, published_tensors
from offbeat.model.usage import kind_of
from offbeat.trainer.compiling import layers_of
from offbeat.trainer.layer_clock import LayerClock
from offbeat.trainer.ordered import HostAllGather, HostReduceScatter, OrderedReduceScatter, Round
from offbeat.trainer.output_head import OutputHead
from offbeat.trainer.packing import Microbatch
from offbeat.trainer.policy import AdamSettings, Forward, LossFunction, Policy
from offbeat.trainer.ranks import Gang
from offbeat.trainer.rounds import Ranks
from offbeat.trainer.version_parts import RowRange, RowsOfVersion, rows_of
from offbeat.weights.divided import Parts, like
from offbeat.weights.safetensor_file import file_layout, read_at
from offbeat.weights.version import DTYPES


def shard(model: PreTrainedModel, gang: Gang, *, trains: bool, path: str | None = None) -> None:
    """Divides a model among ranks, and moves this rank's part to its device. With `trains`, trained weights become
    float32 masters, which a pass rounds to the model's dtype. A model without weights (`load_without_weights`) gets
    this rank's rows from the model at `path`."""
    dtype, kind = model.dtype, type(model)
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UserError(
            f"model.path: {kind_of(model)}: {scalars[0]} is a single number, which cannot be divided among ranks; set "
            "trainer.ranks = 1"
        )
    mesh = DeviceMesh(gang.device.type, torch.arange(gang.size), mesh_dim_names=("ranks",))
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    precision = half if dtype != torch.float32 else MixedPrecisionPolicy(cast_forward_inputs=False)
    parts: list[Any] = [*layers_of(model), model]
    for unit in parts:
        for parameter in unit.parameters():
            if trains and parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=unit is not model)
    # FSDP2 has put a class of its own over the model's; transformers looks for the code where the class says.
    type(model).__module__, type(model).__name__, type(model).__qualname__ = (
        kind.__module__,
        kind.__name__,
        kind.__qualname__,
    )
    if any(parameter.is_meta for parameter in model.parameters()):
        assert path is not None, "this is a bug: a model without weights needs a path to read them from"
        model._apply(lambda t: torch.empty_like(t, device=gang.device) if t.is_meta else t.to(gang.device))
        _read_rows(model, gang, path, dtype)
    for module in _units(model):
        module.set_gradient_divide_factor(1.0)  # neither setting reaches the units below
        module.set_force_sum_reduction_for_comms(True)
        if gang.via_host:
            module.set_custom_all_gather(HostAllGather())
            module.set_custom_reduce_scatter(HostReduceScatter())


@torch.no_grad()
def _read_rows(model: PreTrainedModel, gang: Gang, path: str, dtype: torch.dtype) -> None:
    """Reads this rank's rows of all weights, rounded to `dtype`, without mapping the files: mapped pages would count as
    memory of this process."""
    files = stored_weights(path)
    own = state_tensors(model)
    with ExitStack() as opened:
        stores = {file: opened.enter_context(open(file, "rb")) for file in sorted(set(files.values()))}
        places = {file: file_layout(store) for file, store in stores.items()}
        for names in tied_names(model):
            stored_as = next(name for name in names if name in files)
            file = files[stored_as]
            tensor, place = own[names[0]], places[file][stored_as]
            total = place.shape[0]
            rows = rows_of(total, gang.rank, gang.size) if isinstance(tensor, DTensor) else RowRange(0, total, total)
            row_bytes = (place.stop - place.start) // max(total, 1)
            data = read_at(stores[file], place.start + rows.start * row_bytes, rows.num * row_bytes)
            found = torch.from_numpy(data).view(getattr(torch, DTYPES[place.dtype]))
            _local(tensor).copy_(found.view(rows.num, *place.shape[1:]).to(dtype))


class ShardedPolicy(Policy):
    """The model being trained and its optimizer, divided among the ranks of a gang."""

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
        *,
        gang: Gang,
        path: str | None = None,
    ):
        """Takes over `model`, which is whole and on the CPU, or without weights, which are then read from `path`. The
        other parameters are those of `Policy`."""
        self.gang = gang
        self._dtypes = {name: (tensor.dtype, tensor.shape) for name, tensor in published_tensors(model).items()}
        self._next_version = RowsOfVersion(gang)
        self._round = Round()
        self._head_sums: list[Tensor] = []
        shard(model, gang, trains=True, path=path)
        self.layer_clock = LayerClock(model, gang.device)
        self._comms: list[OrderedReduceScatter] = []
        if exact and gang.size > 1:
            for unit in _units(model):
                self._comms.append(OrderedReduceScatter(self._round, via_host=gang.via_host))
                unit.set_custom_reduce_scatter(self._comms[-1])
        super().__init__(
            model, adam, temperature, gradient_checkpointing, has_value_head, compiles, moments_on_host, exact
        )
        if not self.usage.packs:
            raise UserError(
                f"model.path: {kind_of(model)} {self.usage.obstacle or 'cannot be run over packed rows'}, so it "
                "cannot be trained on several ranks: they would run different numbers of passes and wait for each "
                "other; set trainer.ranks = 1"
            )
        for unit in _units(model):
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                unit.set_reduce_scatter_unused_params(True)  # such as an expert that no token of this rank chose
        self.device = gang.device
        if self.head is not None:
            self.head.linear.to(self.device)

    def drop_gathered(self, model: PreTrainedModel) -> None:
        ran: Any = model.model if isinstance(model, AdapterDisabled) else model
        ran.reshard()

    @property
    def ranks(self) -> Ranks:
        return self.gang

    @property
    def published(self) -> Mapping[str, Tensor]:
        """The tensors that make up a version, gathered in host memory on rank 0; every rank must read this. Empty on
        the other ranks."""
        return dict(self._gathered(published_tensors(self.model)))

    def own_parts(self) -> tuple[dict[str, Tensor], Parts]:
        """Returns the tensors that make up a version, without memory, and those of their parts that belong to this
        rank; every rank must call this. See `RowsOfVersion.take`."""
        shapes = {name: like(shape, dtype) for name, (dtype, shape) in self._dtypes.items()}
        dtypes = {name: dtype for name, (dtype, _) in self._dtypes.items()}
        return shapes, self._next_version.take(published_tensors(self.model), dtypes)

    @torch.no_grad()
    def _gathered(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            dtype, shape = self._dtypes[name]
            if not isinstance(tensor, DTensor):
                if self.gang.rank == 0:
                    yield name, tensor.to("cpu", dtype, copy=True)
                continue
            each = rows_of(shape[0], 0, self.gang.size).num
            local = tensor.to_local().to(dtype)
            padded = local.new_zeros(each, *shape[1:])
            padded[: len(local)] = local
            if (parts := self.gang.to_rank_0(padded)) is not None:
                yield name, torch.cat(parts)[: shape[0]].clone()

    def _make_masters(self) -> list[Tensor]:
        return [p.to_local().detach() if isinstance(p, DTensor) else p for p in self.parameters]

    @property
    def rows(self) -> dict[str, RowRange | None]:
        """This rank's rows of each trained tensor, by name; None for one that every rank has whole."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {
            name: rows_of(p.shape[0], self.gang.rank, self.gang.size) if isinstance(p, DTensor) else None
            for name, p in pairs
        }

    def held_state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Returns what this rank writes into a checkpoint: its rows of masters and moments, by name, and the place of
        the first row of each. Rank 0 also writes what all ranks have whole."""
        rows, state, starts = self.rows, {}, {}
        for key, tensor in self.state().items():
            kind, name = key.split(".", 1)
            own = rows[name] if kind != "step" else None
            if own is None:
                if self.gang.rank == 0:
                    state[key] = tensor
            elif own.num:
                state[key], starts[key] = tensor, own.start
        return state, starts

    def wanted_rows(self, key: str) -> tuple[int, int] | None:
        """Returns the rows that this rank needs of a tensor in a checkpoint: the first one and their number; None: all
        of them."""
        kind, _, name = key.partition(".")
        own = self.rows.get(name) if kind != "step" else None
        return None if own is None else (own.start, own.num)

    @torch.no_grad()
    def logprobs(self, microbatch: Microbatch, model: PreTrainedModel | None = None) -> Tensor:
        found = super().logprobs(microbatch, model)
        self.drop_gathered(model or self.model)
        return found

    @torch.no_grad()
    def infer(self, microbatch: Microbatch) -> Forward:
        found = super().infer(microbatch)
        self.drop_gathered(self.model)
        return found

    def forward_backward(self, microbatch: Microbatch, loss: LossFunction, num_real: int = 1) -> Tensor:
        self._round.num_real = num_real
        if self._comms:  # they add up the rounds themselves
            for parameter in self.parameters:
                if isinstance(parameter, DTensor):
                    parameter.grad = None
        found = self._forward(microbatch)
        loss(found).backward()
        self.drop_gathered(self.model)
        if self.head is not None:
            self._sum_head(num_real)
        return found.logprobs.detach()

    def _sum_head(self, num_real: int) -> None:
        """Adds this round's gradients of the value head, of all ranks with a micro-batch, in the order of ranks."""
        assert self.head is not None
        own = [parameter.grad for parameter in self.head.linear.parameters()]
        items = {str(i): gradient.cpu().numpy() for i, gradient in enumerate(own) if gradient is not None}
        for _, found in self.gang.merge([(self.gang.rank, items)])[:num_real]:
            chunks = [torch.tensor(found[key], device=self.device) for key in sorted(found)]
            if not self._head_sums:
                self._head_sums = chunks
            else:
                torch._foreach_add_(self._head_sums, chunks)
        for parameter in self.head.linear.parameters():
            parameter.grad = None

    def update(self, lr: float) -> float:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if isinstance(parameter, DTensor):
                gradient, parameter.grad = parameter.grad, None
                master.grad = None if gradient is None else _local(gradient)
        if self.head is not None and self._head_sums:
            for parameter, gradient in zip(self.head.linear.parameters(), self._head_sums, strict=True):
                parameter.grad = gradient
        return super().update(lr)

    def _row_squares(self) -> list[np.ndarray]:
        own = {str(i): rows for i, rows in enumerate(super()._row_squares())}
        told = [found for _, found in self.gang.merge([(self.gang.rank, own)])]
        return [
            np.concatenate([found[str(i)] for found in told]) if isinstance(p, DTensor) else told[0][str(i)]
            for i, p in enumerate(self.parameters)
        ]

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for parameter in self.parameters:
            parameter.grad = None
        for comm in self._comms:
            comm.begin_update()
        self._head_sums = []

    def _round_into_model(self) -> None:
        """Does nothing: a pass rounds the masters when it gathers them."""

    def _find_output_head(self, model: PreTrainedModel) -> OutputHead | None:
        found = super()._find_output_head(model)
        if found is not None:
            owners = {id(one.unsharded): one for one in _sums_of_root(self.model)}
            found.gradient_of = lambda weight: owners.get(id(weight))  # type: ignore[assignment,return-value]
        return found

    def _forward(self, microbatch: Microbatch) -> Forward:
        found = super()._forward(microbatch)
        if torch.is_grad_enabled() and self._output_head(self.model, microbatch) is not None:
            for one in _sums_of_root(self.model):
                one.begin()
        return found

    @contextmanager
    def weights_of(self, file: Path) -> Iterator[None]:
        own = {name: tensor for name, tensor in published_tensors(self.model).items()}
        kept = {name: _local(tensor).clone() for name, tensor in own.items()}
        problem = ""
        try:
            with torch.no_grad():
                try:
                    with safe_open(file, framework="pt") as stored:
                        for name, tensor in own.items():
                            _local(tensor).copy_(self._own_rows(stored, name, tensor))
                except Exception as error:  # noqa: BLE001 - all ranks have to know
                    problem = f"{type(error).__name__}: {error}"
            if problems := self.gang.agree(problem):
                raise OSError("; ".join(problems))
            yield
        finally:
            self.drop_gathered(self.model)
            with torch.no_grad():
                for name, tensor in own.items():
                    _local(tensor).copy_(kept[name])

    def _own_rows(self, stored: Any, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return stored.get_tensor(name)
        rows = rows_of(tensor.shape[0], self.gang.rank, self.gang.size)
        return stored.get_slice(name)[rows.start : rows.start + rows.num]


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class _RootGradient:
    """Gradient of one weight outside of the decoder layers, for an output head that adds to it chunk by chunk. FSDP2
    adds what autograd finds, and divides the sum among ranks."""

    held: Any
    """FSDP2's record of the weight."""

    @property
    def unsharded(self) -> Tensor | None:
        return getattr(self.held, "_unsharded_param", None)

    @property
    def grad(self) -> Tensor | None:
        found: Tensor | None = self.held.unsharded_accumulated_grad
        return found

    def begin(self) -> None:
        weight = self.unsharded
        assert weight is not None
        self.held.unsharded_accumulated_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _sums_of_root(model: Any) -> list[_RootGradient]:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before torch 2.13
    held = [one for group in groups for one in group.fsdp_params]
    return [_RootGradient(one) for one in held if one.sharded_param.requires_grad]
