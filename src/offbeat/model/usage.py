"""Decides whether Offbeat's own attention, over packed rows (trainer) and KV slots (engine), can replace a model's.

It can if tokens influence each other through attention alone, and if attention needs no option that the replacement
lacks. A model's name and flags do not show this, so the model is probed by a forward pass. In this pass, attention is a
function that records its arguments and returns 0. The input is two rows that end in the same token. If logits or
attention's inputs at this token differ between the rows, earlier tokens have influenced it without attention.

Models whose attention cannot be replaced run with their own and without a KV cache, one sample per row. Rows are padded
on the right, where a causal model does not see the padding. At their start, trainer and engine also compare log-probs
with the model's own (`distance`), in case the probe missed something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offbeat.errors import OffbeatError, UserError

PROBE = "offbeat_probe"
OPTION = "offbeat_option"
"""Option that the probe passes to the model, to see whether the model hands options on to attention."""
UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
"""Attention options that trainer and engine support."""
FOR_OTHERS = {OPTION, "position_ids", "use_cache", "logits_to_keep", "return_dict"} | {
    f"output_{what}" for what in ("attentions", "hidden_states", "router_logits")
}
"""Options that models pass to all their modules and that have no effect on attention."""
WIDE = (torch.float32, torch.float64)
MIXED, MIXED_HALF = 1e-3, 2e-2
"""Relative difference above which two rows differ by more than rounding: in wide dtypes (`WIDE`), and in others."""
MAX_DISTANCE, MAX_DISTANCE_HALF = 0.01, 0.2
"""Largest `distance` allowed: in wide dtypes (`WIDE`), and in others. Rounding to bfloat16 moves log-probs by a few
hundredths of their standard deviation; a wrong layer moves them by a third or more."""


@dataclass(frozen=True)
class Usage:
    """How a model can be run: whether its attention can be replaced, and which options it takes."""

    obstacle: str | None
    """Why attention cannot be replaced, in words that follow the model's name, such as "does not take position_ids";
    None: it can be."""
    hands_on: bool
    """Whether the model passes the options of a call on to its attention."""
    picks_logits: bool
    """Whether the model takes `logits_to_keep`, and so can compute logits at chosen positions only."""

    @property
    def packs(self) -> bool:
        """Whether the model can be trained over packed rows (many samples in one row, without padding)."""
        return self.obstacle is None and self.hands_on

    @property
    def has_slots(self) -> bool:
        """Whether the embedded engine can run the model with cached keys and values, in one slot per request."""
        return self.obstacle is None


def window_of(module: nn.Module) -> int | None:
    """Returns an attention layer's window: the number of latest tokens, including the current one, that it attends to;
    None: all tokens so far. `usage` must have been called on the model."""
    window: int | None = module.__dict__.get("offbeat_window")
    return window


@torch.no_grad()
def usage(model: PreTrainedModel) -> Usage:
    """Runs the probe on `model` (see the module's docstring). Returns whether Offbeat's attention can replace the
    model's, and which options the model takes. Also stores each attention layer's window in the layer, where
    `window_of` finds it; and the result in the model, so that the model and its copies are probed only once."""
    known = model.__dict__.get("offbeat_usage")
    if isinstance(known, Usage):
        return known
    takes, seen = inspect.signature(model.forward).parameters, _Seen()
    obstacle = _obstacle(model, takes, seen)
    found = Usage(obstacle, seen.hands_on, "logits_to_keep" in takes)
    model.__dict__["offbeat_usage"] = found
    return found


def _obstacle(model: PreTrainedModel, takes: Mapping[str, inspect.Parameter], seen: _Seen) -> str | None:
    if "position_ids" not in takes:
        return "does not take position_ids"
    if not model._can_set_attn_implementation():
        return "does not let its attention be replaced"
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    given = {OPTION: True} if takes_more else {}
    tokens = torch.tensor(probe_tokens(model, 7), device=model.device)
    rows = torch.stack((tokens[:4], tokens[[4, 5, 6, 3]]))
    asking = _asking.set(seen)
    try:
        with attending(model, PROBE):
            logits = model(input_ids=rows, use_cache=False, **given).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything
        return f"does not let its attention be replaced ({type(error).__name__})"
    finally:
        _asking.reset(asking)
    if not seen.asked:
        return "does not let its attention be replaced"
    if seen.mixes or _differ(logits[:, -1]):
        return "has layers beside attention that mix tokens"
    return seen.obstacle


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Makes a model use the attention named `implementation` in the `with` block, and afterwards its own again."""
    parts = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in parts.values()]
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def max_distance(found: PreTrainedModel | Tensor) -> float:
    """Returns the largest `distance` that rounding in the dtype of `found` can explain: a model, or its logits."""
    return MAX_DISTANCE if found.dtype in WIDE else MAX_DISTANCE_HALF


def distance(found: Tensor, own: Tensor) -> float | None:
    """Returns how far the logits `found` are from `own`, the logits of the model's own forward pass. This is the root
    mean square difference of their log-probs, divided by the standard deviation of the log-probs of `own`. None if the
    log-probs of `own` are not finite."""
    one, other = found.float().log_softmax(-1), own.float().log_softmax(-1)
    if not bool(other.isfinite().all()):
        return None
    spread = other.std(-1).mean().clamp(min=1e-6)  # 0 for an untrained model
    return float((one - other).square().mean().sqrt() / spread)


def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Returns the logits for rows of tokens, computed with transformers' own `eager` attention, for comparison."""
    with attending(model, "eager"):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@contextmanager
def one_line_errors(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turns an error of a model's code in the `with` block into a `UserError` of one line that says that `what`
    fails."""
    try:
        yield
    except (OffbeatError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(
            f"model.path: {kind_of(model)}: {what} fails: {type(error).__name__}: {why}; take a model that "
            "docs/models.md lists"
        ) from error


@contextmanager
def without_random(model: PreTrainedModel) -> Iterator[None]:
    """Restores the random state of the CPU and of the model's GPU after the `with` block."""
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        yield


def kind_of(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def probe_tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Returns the ids of `count` ordinary (not special) tokens, all different if the vocabulary is large enough."""
    config = model.config.get_text_config()
    named = [value for key, value in vars(config).items() if key.endswith("_token_id")]
    special = {token for value in named for token in (value if isinstance(value, list) else [value])}
    plain = [token for token in range(3, min(config.vocab_size, count + 64)) if token not in special] or [0]
    return [plain[i % len(plain)] for i in range(count)]


class _Seen:
    """State of one probe. Its method `attend` replaces the model's attention, returns zeros, and records what its
    arguments reveal."""

    def __init__(self) -> None:
        self.asked: dict[nn.Module, object] = {}
        self.mixes, self.hands_on = False, True
        self.obstacle: str | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        self.mixes |= any(_differ(states[:, :, -1]) for states in (query, key, value))
        self.hands_on &= OPTION in options
        extra = {name for name, asked in options.items() if asked is not None} - UNDERSTOOD - FOR_OTHERS
        pattern = getattr(attention_mask, "offbeat_pattern", _OTHER)
        if extra:
            self.obstacle = f"asks for {', '.join(sorted(extra))} in its attention"
        elif pattern is _OTHER or self.asked.get(module, pattern) != pattern:
            self.obstacle = "has attention that is neither causal nor causal within a window"
        else:
            module.offbeat_window = pattern  # type: ignore[assignment]
        self.asked[module] = pattern
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


_OTHER = object()
_asking: ContextVar[_Seen] = ContextVar("asking")
"""The current probe; a context variable, because several models may be probed at once."""


def _attend(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, None]:
    return _asking.get().attend(module, *states, **options)


def _pattern(
    *, mask_function: Callable[..., Tensor], device: torch.device, local_size: int | None = None, **_: Any
) -> Tensor:
    """Stands in for the model's mask function in the probe; returns a small tensor in place of the mask. For a causal
    mask, the tensor gets an attribute `offbeat_pattern`: the length of the mask's window, or None without a window. For
    any other mask it has no such attribute."""
    mask = torch.zeros((1, 1, 1, 1), device=device)
    reach = 4 if local_size is None else local_size
    at = torch.tensor(sorted({0, 1, reach - 1, reach, reach + 1, 2 * reach}), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    behind = at[:, None] - at[None, :]
    wanted = (behind >= 0) if local_size is None else (behind >= 0) & (behind < local_size)
    try:
        found = torch.stack([torch.stack([mask_function(zero, zero, q, kv) for kv in at]) for q in at])
    except IndexError:  # the mask depends on more than the distance between tokens
        return mask
    if torch.equal(found.bool(), wanted):
        mask.offbeat_pattern = local_size  # type: ignore[attr-defined]
    return mask


def _differ(rows: Tensor) -> bool:
    """Whether the two rows of the tensor differ by more than rounding can explain."""
    one, other = rows.float()
    return bool((one - other).norm() > (MIXED if rows.dtype in WIDE else MIXED_HALF) * one.norm())


AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _pattern)
