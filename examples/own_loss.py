"""A loss of one's own: a clip without an edge.

PPO's clip cuts a token's gradient off at once where its ratio leaves [1 - low, 1 + high]. Here the ratio's distance
from 1 goes through tanh, so that a token learns less and less the further it has moved, and never nothing.

    offbeat check-loss examples/own_loss.py:loss
"""

import torch

from offbeat.trainer.losses import LossSettings, Tokens


def loss(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
    """-(1 + w tanh((r - 1) / w)) A, where w is clip_high above 1 and clip_low below."""
    distance = tokens.log_ratio.exp() - 1  # log_ratio is bounded, so that exp cannot overflow
    width = torch.where(distance > 0, settings.clip_high, settings.clip_low)
    return -(1 + width * torch.tanh(distance / width)) * tokens.advantages
