"""Offbeat beside TRL's GRPOTrainer: `python -m benchmarks.demo_vs_trl [--quick] [--trl-python PATH]`.

Both train offbeat-tiny on built-in arithmetic with the same prompts, batch (32 prompts x 8 answers per step, one
update), reward, loss and optimizer. They run in turn, in separate processes on the same cores. Compares

- samples per second over whole steps (generation, rewards, training, weights, ledger) without the first steps, on the
  demo's task and on the same task with a long tail of answer lengths;
- samples needed until the held-out reward reaches a threshold that both reach, with all weights judged in the same way.

TRL runs with the fastest of several settings, see `CANDIDATES`.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence

from benchmarks import report
from benchmarks.common.learning import Curve, HeldOut, rounded
from benchmarks.common.trl_environment import trl_python
from benchmarks.demo_vs_trl.pairs import BUSY_SHARE, DEMO, FULL, LONG_TAIL, QUICK, Pairs, curves_of, samples_bar, say
from offbeat.errors import OffbeatError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_vs_trl", description="Offbeat beside TRL.")
    parser.add_argument("--quick", action="store_true", help="one short repeat: ends within a minute")
    parser.add_argument("--trl-python", metavar="PATH", help="of an environment with TRL; without it, one is made")
    options = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # an orderly end: no run goes on alone, no folder stays behind
    efforts = QUICK if options.quick else FULL
    try:
        python = trl_python(options.trl_python)
        pairs = {setting.name: Pairs(setting, efforts[setting.name]) for setting in (DEMO, LONG_TAIL)}
        with report.scratch("demo_vs_trl") as folder:
            for number, chosen in enumerate(pairs.values()):
                chosen.choose(folder / str(number), python)
                chosen.train(folder / str(number), python)
            judge = HeldOut("offbeat-tiny", DEMO.tail, DEMO.max_new_tokens)
            start = judge.reward()
            trl, offbeat = (curves_of(runs, judge, start) for runs in (pairs["demo"].trl, pairs["demo"].offbeat))
        show(list(pairs.values()), trl, offbeat, quick=options.quick)
    except OffbeatError as error:
        say(str(error))
        return 1
    return 0


def show(pairs: Sequence[Pairs], trl: Sequence[Curve], offbeat: Sequence[Curve], *, quick: bool) -> None:
    rows, bars, raw = [], {}, {}
    for chosen in pairs:
        name = chosen.setting.name
        bars[f"samples/s over TRL, {name}"] = chosen.speed_bar(quick=quick)
        theirs, ours = ([chosen.rate(run) for run in runs] for runs in (chosen.trl, chosen.offbeat))
        rows.append((f"samples/s, {name}", *(spread(values, "{:.0f}") for values in (theirs, ours))))
        if chosen.others_share() > BUSY_SHARE:
            say(f"{name}: others used up to {chosen.others_share():.0%} of the cores; speeds are doubtful")
        raw[name] = {
            "trl_samples_per_second": rounded(theirs, 1),
            "offbeat_samples_per_second": rounded(ours, 1),
            "steps": chosen.effort.steps,
            "warmup_steps": chosen.effort.num_warmup,
            "others_share_of_cores": round(chosen.others_share(), 3),
            "trl_settings": chosen.trl_settings,
        }
    bars["samples to the same held-out reward, over TRL"], learning = samples_bar(trl, offbeat, quick=quick)
    crossings = learning["trl_samples"], learning["offbeat_samples"]
    rows.append((f"samples to {learning['threshold']:.3f} held out", *(spread(c, "{:,.0f}") for c in crossings)))
    heights = ([curve.highest for curve in curves] for curves in (trl, offbeat))
    rows.append(("highest held-out reward", *(spread(values, "{:.3f}") for values in heights)))
    raw["learning"] = {
        "threshold": round(learning["threshold"], 4),
        "samples": trl[0].samples,
        "trl_held_out": [rounded(curve.rewards, 4) for curve in trl],
        "offbeat_held_out": [rounded(curve.rewards, 4) for curve in offbeat],
        "trl_samples_needed": rounded(crossings[0], 0),
        "offbeat_samples_needed": rounded(crossings[1], 0),
    }
    report.show("demo_vs_trl", ("median (range)", "TRL", "Offbeat"), rows, bars, quick=quick, **raw)


def spread(values: Sequence[float], form: str) -> str:
    middle = form.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    sys.exit(main())
