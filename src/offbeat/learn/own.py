"""Losses and advantages of the user's own, found by `module:function` or `file.py:function`.

    def loss(tokens: offbeat.learn.tokens.Tokens, settings: offbeat.learn.losses.LossSettings) -> Tensor
    def advantage(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray

A loss returns one value per token (or a `TokenLoss`, to tell which were clipped); corrections and aggregation are
applied to it as to any other. `offbeat check-loss` runs the contract on either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.errors import UserError
from offbeat.learn.advantages import ADVANTAGES, Advantage
from offbeat.learn.losses import LossSettings, PolicyLoss, TokenLoss
from offbeat.learn.tokens import Tokens
from offbeat.locate import locate


def load_advantage(spec: str) -> Advantage:
    """A built-in advantage by its name, or the user's own."""
    return ADVANTAGES[spec] if spec in ADVANTAGES else locate(spec, "loss.advantage")


def load_loss(spec: str) -> PolicyLoss:
    """The user's own loss, with what it returns checked."""
    function = locate(spec, "loss.name")

    def loss(tokens: Tokens, settings: LossSettings) -> TokenLoss:
        found = function(tokens, settings)
        if isinstance(found, TokenLoss):
            return found
        if not isinstance(found, Tensor) or found.shape != tokens.mask.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UserError(
                f"loss.name = {spec!r}: returned {shape}; wanted a tensor of shape {tuple(tokens.mask.shape)}"
            )
        return TokenLoss(found, torch.zeros_like(tokens.mask))

    return loss
