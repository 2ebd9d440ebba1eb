"""The cost model on AReaL-Hex's clusters, with six constants fitted to its published figures.

Some facts are unknown and therefore assumed. The batch has 512 trajectories of about 5,000 tokens, with exponential
lengths cut at the published 27,648, because throughput times step time gives 1.7 to 3.0 million tokens. Clusters of one
type are split by whole nodes in the best way (*tuned*), or half and half (*uniform*). A replica is one card, which can
hold each of these models.

A rollout is one batch that drains (see `draining`). The part of a decode step that does not depend on its rows (reading
weights, overhead) has the default constants; the part of each row is slower by a factor for the kind of card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.hex_replay.draining import drain_s
from offbeat.planner.cost.constants import Constants, Efficiencies, FigureSource
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.training_time import compute_s
from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.planner.inputs.model_shapes import weight_bytes
from offbeat.planner.inputs.workload import KvPolicy, LengthStatistics, ModelShape, Workload

PER_NODE = 8
H800 = Accelerator("h800", 756e12, 80e9, 2.0e12, 200e9, 50e9, None, 5.28, "AReaL-Hex")
H20 = Accelerator("h20", 148e12, 96e9, 4.0e12, 450e9, 50e9, None, 1.85, "AReaL-Hex")
CARDS = {card.name: card for card in (H800, H20)}
PRICES = {"h800": 5.28, "h20": 1.85}
MAX_H20 = 128
"""Largest number of H20 tried; with more, the copies of an update take longer than the machines save."""
SHAPES = {
    "1.5B": ModelShape("R1-Distill-Qwen-1.5B", 28, 1536, 12, 2, 128, 8960, 151_936),
    "7B": ModelShape("R1-Distill-Qwen-7B", 28, 3584, 28, 4, 128, 18_944, 152_064),
    "14B": ModelShape("R1-Distill-Qwen-14B", 48, 5120, 40, 8, 128, 13_824, 152_064),
}
KNOWN = "7B"
"""Model for which the fitted training share is the MFU itself."""


@dataclass(frozen=True)
class Six:
    """The six fitted constants."""

    h800_rollout: float
    """Time that each row adds to a decode step by the default constants, over its time here."""
    h20_rollout: float
    h800_training: float
    """MFU of the 7B model, with all communication included; for other models see `activations`."""
    h20_training: float
    update_start_s: float
    """Constant part of the seconds of an update inside one type of machines."""
    link_passes: float
    """Number of times that an update sends the bytes of the weights over the link inside a node."""

    def constants(self, model: str) -> Constants:
        """Returns the planner's constants: shares of work per row are scaled, all others are the defaults."""
        constants = Constants()
        flop = ideal_training_s(model, "h800") / ideal_training_s(KNOWN, "h800")
        for name, rollout, training in (
            ("h800", self.h800_rollout, self.h800_training),
            ("h20", self.h20_rollout, self.h20_training),
        ):
            constants = constants.with_figures(
                name,
                FigureSource.FITTED,
                **row_shares(rollout),
                training_share=training * flop / activations(model),
                tp_exposed_share=0.0,
                dp_exposed_share=0.0,
            )
        return constants


def inventory(num_h800: int, num_h20: int) -> Inventory:
    """Returns the published machines, with 5 GB/s between nodes of a type and 1.5 GB/s between types."""
    counts = {"h800": num_h800 // PER_NODE, "h20": num_h20 // PER_NODE}
    classes = {name: MachineClass(name, CARDS[name], PER_NODE, counts[name], PRICES[name]) for name in counts}
    links = {frozenset((one,)): Link(5e9) for one in classes} | {frozenset(classes): Link(1.5e9)}
    return Inventory(classes, links)


def workload(model: str) -> Workload:
    """Returns AReaL's workload (mathematics) with the assumed batch. Its blocking update is computed separately."""
    return Workload(
        SHAPES[model],
        groups_per_step=32,
        group_size=16,
        prompt=LengthStatistics(300, 300**2, 1024, 0.01, 1024),
        answer=LengthStatistics(5000, 2 * 5000**2, 20_000, 0.02, 27_648),
        bound=8,
        updates_per_step=4,
        kv=KvPolicy.STALE,
    )


ROW_SHARES = ("gemm_share", "kv_read_share", "prefill_share", "link_share")
"""Constants for the parts of a decode step that grow with its rows: the shares of the peak that they reach."""


def row_shares(factor: float) -> dict[str, float]:
    """Returns the defaults of `ROW_SHARES`, multiplied by `factor`."""
    return {name: factor * getattr(Efficiencies(), name) for name in ROW_SHARES}


@cache
def ideal_training_s(model: str, card: str) -> float:
    """Seconds of training a step on one card at its peak."""
    return compute_s(workload(model), CARDS[card].flops, recompute=False)


def activations(model: str) -> float:
    """Activations of a token in all layers, over those of the 7B model. The published training seconds are proportional
    to this, not to FLOP."""
    shape, known = SHAPES[model], SHAPES[KNOWN]
    return shape.num_layers * shape.hidden / (known.num_layers * known.hidden)


class Replay:
    """Seconds and tokens a second of one model on the published clusters."""

    def __init__(self, model: str, six: Six):
        self.model, self.six = model, six
        self.workload = workload(model)
        self.tokens = self.workload.generated_tokens_per_step
        self.figures = {card: replace(Efficiencies(), **row_shares(getattr(six, f"{card}_rollout"))) for card in CARDS}
        self._rollouts: dict[tuple[str, int], float] = {}

    def rollout_s(self, card: str, num_cards: int) -> float:
        """Seconds until the longest answer of a batch ends."""
        key = card, num_cards
        if key not in self._rollouts:
            self._rollouts[key] = drain_s(self.workload, CARDS[card], self.figures[card], num_cards)
        return self._rollouts[key]

    def train_s(self, card: str, num_cards: int) -> float:
        one_s = ideal_training_s(KNOWN, card) * activations(self.model) / getattr(self.six, f"{card}_training")
        return one_s / num_cards

    def update_s(self, card: str) -> float:
        """Seconds of an update inside one type of machines."""
        sent_s = weight_bytes(SHAPES[self.model]) / CARDS[card].link_bytes_per_s
        return self.six.update_start_s + self.six.link_passes * sent_s

    def hex_update_s(self, num_h20: int) -> float:
        """Seconds of Hex's update, in which every receiving machine in turn gets its own copy over the slow link."""
        link = inventory(8, num_h20).link("h800", "h20")
        return num_h20 // PER_NODE * update_bytes(self.workload) / link.bytes_per_s

    def tuned(self, card: str, num_cards: int) -> tuple[float, float]:
        """Rollout and training seconds of the best split by whole nodes."""
        splits = [
            (self.rollout_s(card, num_cards - trained), self.train_s(card, trained))
            for trained in range(PER_NODE, num_cards, PER_NODE)
        ]
        return min(splits, key=max)

    def hex_rate(self, num_h20: int) -> float:
        """Tokens per second if all H20 roll out, eight H800 train, and both wait for the update."""
        return self.tokens / (self.hex_update_s(num_h20) + self.tokens / self.hidden_rate(num_h20))

    def hidden_rate(self, num_h20: int) -> float:
        """Same as `hex_rate`, but without waiting for updates."""
        return self.tokens / max(self.rollout_s("h20", num_h20), self.train_s("h800", 8))

    def hex_price_per_h(self, rate: float) -> float:
        """Lowest price of one training node of H800 and rollout nodes of H20 that reach `rate` tokens per second."""
        enough = (num for num in range(PER_NODE, MAX_H20 + 1, PER_NODE) if self.hex_rate(num) >= rate)
        num_h20 = next(enough, math.inf)
        return PER_NODE * PRICES["h800"] + num_h20 * PRICES["h20"]

    def tuned_rate(self, card: str, num_cards: int) -> float:
        return self.tokens / (self.update_s(card) + max(self.tuned(card, num_cards)))

    def predict(self, name: str) -> float:
        return PREDICTIONS[name](self)


PREDICTIONS: dict[str, Callable[[Replay], float]] = {
    "update s, H800": lambda replay: replay.update_s("h800"),
    "update s, H20": lambda replay: replay.update_s("h20"),
    "update s, Hex": lambda replay: replay.hex_update_s(48),
    "tokens/s, 24 H800 uniform": lambda replay: (
        replay.tokens / (replay.update_s("h800") + max(replay.rollout_s("h800", 12), replay.train_s("h800", 12)))
    ),
    "tokens/s, 24 H800 tuned": lambda replay: replay.tuned_rate("h800", 24),
    "tokens/s, 8 H800 + 24 H20": lambda replay: replay.hex_rate(24),
    "tokens/s, 64 H20": lambda replay: replay.tuned_rate("h20", 64),
    "tokens/s, 8 H800 + 48 H20": lambda replay: replay.hex_rate(48),
    "step s, 64 H20": lambda replay: max(replay.tuned("h20", 64)),
    "rollout s, 24 H800": lambda replay: replay.tuned("h800", 24)[0],
    "training s, 24 H800": lambda replay: replay.tuned("h800", 24)[1],
    "rollout s, 8 H800 + 48 H20": lambda replay: replay.rollout_s("h20", 48),
    "training s, 8 H800 + 48 H20": lambda replay: replay.train_s("h800", 8),
    "rollout s, 32 H800": lambda replay: replay.tuned("h800", 32)[0],
    "training s, 32 H800": lambda replay: replay.tuned("h800", 32)[1],
    "rollout s, 88 H20": lambda replay: replay.tuned("h20", 88)[0],
    "training s, 88 H20": lambda replay: replay.tuned("h20", 88)[1],
    "rollout s, 24 H800 + 24 H20": lambda replay: replay.rollout_s("h20", 24),
    "training s, 24 H800 + 24 H20": lambda replay: replay.train_s("h800", 24),
}
"""Functions that predict the published figures, by the figures' names."""
