"""AReaL-Hex's published figures by our cost model: `python -m benchmarks.hex_replay [--quick]`.

Six constants are fitted to the figures of two models and predict those of the third; each model is left out in turn.
Then, with constants from all three, Hex's own plan with its blocking update is compared with 24 H800, and so is our
planner on the same machines. Everything is computed from published figures and an assumed batch; AReaL-Hex did not run.

How the form was chosen, after looking at the errors of left-out models, and by their mean alone: that a rollout is one
batch that drains, that training goes with activations and not with FLOP, that every receiving machine takes a copy of
an update, and that an update inside one type has a start and goes with the link inside a node, were seen in these very
figures. Some sixty forms, with absolute or squared errors in the fit, erred by 16 to 65 %, so the held-out error is
optimistic; so it is by counting both H20 bars of Fig. 4 as one. Two forms of rollout are equal by it, a batch that
drains and full cards that never do; over all published figures, Fig. 2 included, the first errs less and is kept. What
is said of our plans hangs on that choice: the results page has both.

One batch for all cannot meet seconds and ratios together: the published seconds say 1.27, 1.35 and 1.26 where the
published ratios say 1.36, 1.31 and 1.50.

Fig. 2 is listed and left out of the fit: its training agrees with Fig. 4 in card seconds for two models, but its H20
rollout is 3.4 to 5.6 times faster, which no constant explains. A bar of its own counts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict

from benchmarks import report
from benchmarks.hex_replay.fit import fit
from benchmarks.hex_replay.ours import Beside, beside
from benchmarks.hex_replay.published import (
    H800_PRICE_PER_H,
    HEX_PRICE_PER_H,
    HIDDEN_SPEEDUPS,
    MODELS,
    SPEEDUPS,
    Point,
    case_study_work,
    points,
    speedup_by_seconds,
)
from benchmarks.hex_replay.replay import Replay

MAX_ERROR = 0.20
MAX_RATIO_ERROR = 0.10
MIN_SPEEDUPS = {"1.5B": 1.45, "7B": 1.55, "14B": 1.70}
MIN_SAVING = 1.6
HEADER = ("figure", "source", "model", "published", "predicted", "error")


def left_out() -> list[tuple[Point, float]]:
    """Returns every published figure with its prediction, by constants that were fitted without its model."""
    everything = points()
    predicted = []
    for model in MODELS:
        six = fit([point for point in everything if point.model != model and not point.is_case_study])
        replay = Replay(model, six)
        predicted += [(point, replay.predict(point.name)) for point in everything if point.model == model]
    return predicted


def mean_error(predicted: list[tuple[Point, float]]) -> float:
    errors = [abs(told / point.value - 1) for point, told in predicted]
    return sum(errors) / len(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description="AReaL-Hex's published figures by our cost model.")
    parser.add_argument("--quick", action="store_true", help="the same: it is quick")
    options = parser.parse_args()
    predicted = left_out()
    fitted = [pair for pair in predicted if not pair[0].is_case_study]
    case_study = [pair for pair in predicted if pair[0].is_case_study]
    six = fit([point for point, _ in fitted])
    replays = {model: Replay(model, six) for model in MODELS}
    speedups = {model: one.hex_rate(48) / one.tuned_rate("h800", 24) for model, one in replays.items()}
    besides = {model: beside(model, six) for model in MODELS}
    report.show(
        "hex_replay",
        HEADER,
        [_row(point, told) for point, told in predicted],
        _bars(mean_error(fitted), mean_error(predicted), speedups, besides),
        quick=options.quick,
        constants=asdict(six),
        speedups={
            "published": SPEEDUPS,
            "by the published seconds": {model: speedup_by_seconds(model) for model in MODELS},
            "modelled": speedups,
            "published, update hidden": HIDDEN_SPEEDUPS,
        },
        ours_modelled={model: asdict(one) for model, one in besides.items()},
        published_saving=H800_PRICE_PER_H / HEX_PRICE_PER_H,
        case_study={
            "error": mean_error(case_study),
            "card seconds over Fig. 4's": {model: case_study_work(model) for model in MODELS},
        },
        error_by_model={model: mean_error([pair for pair in fitted if pair[0].model == model]) for model in MODELS},
    )


def _row(point: Point, told: float) -> tuple[str, ...]:
    error = f"{told / point.value - 1:+.0%}"
    return point.name, point.source, point.model, f"{point.value:g}", f"{told:.4g}", error


def _bars(
    error: float, error_with_case_study: float, speedups: Mapping[str, float], besides: Mapping[str, Beside]
) -> dict[str, report.Bar]:
    bars = {
        "mean error, model left out": report.at_most(MAX_ERROR, [error], quick=False),
        "the same with Fig. 2": report.at_most(MAX_ERROR, [error_with_case_study], quick=False),
    }
    for model in MODELS:
        off = abs(speedups[model] / SPEEDUPS[model] - 1)
        bars[f"error of Hex over 24 H800, {model}"] = report.at_most(MAX_RATIO_ERROR, [off], quick=False)
    for model, target in MIN_SPEEDUPS.items():
        name = f"modelled: ours over 24 H800, {model}"
        bars[name] = report.at_least(target, [besides[model].speedup], quick=False)
    for model in MODELS:
        name = f"modelled: price of 24 H800 over ours, {model}"
        bars[name] = report.at_least(MIN_SAVING, [besides[model].saving], quick=False)
    return bars


if __name__ == "__main__":
    main()
