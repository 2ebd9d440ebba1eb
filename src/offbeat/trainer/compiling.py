"""Compiled layers: `torch.compile` for each decoder layer of the policy, on NVIDIA GPUs.

All layers share their code, so the code is compiled once for all layers, and for rows of any length. Compiled kernels
are kept in the user's cache folder, so a restarted trainer reads them instead of compiling again.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.trainer import attention

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_VARIANTS = 64
"""Largest number of variants of one function that torch may compile. Torch's default of 8 is too small for models with
layers of many kinds."""


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def compile_layers(model: PreTrainedModel) -> bool:
    """Makes the decoder layers compile at their first pass; returns whether the model has such layers. Attention over
    packed rows is not compiled, because it calls a kernel of its own."""
    layers = layers_of(model)
    if not layers:
        return False
    os.environ.setdefault(CACHE_VARIABLE, str(cache_folder()))
    import torch._dynamo
    import torch._inductor.config

    # Torch would compile a test for each of the CPU's instruction sets, again in every process: 30 s of a restart.
    torch._inductor.config.cpp.vec_isa_ok = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return True


def undo_compile(model: PreTrainedModel) -> None:
    """Restores the uncompiled forward pass of the model's layers."""
    for layer in layers_of(model):
        layer.__dict__.pop("forward", None)


def uncompiled(is_compiled: bool) -> AbstractContextManager[object]:
    """Returns a context in which compiled layers run uncompiled. If `is_compiled` is False, the context does
    nothing."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def cache_folder() -> Path:
    """Returns the folder for compiled kernels, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat" / "kernels"
