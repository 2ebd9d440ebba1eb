"""One version to six receivers behind one slow link, by relays: `python -m benchmarks.relay [--quick]`.

Sender and receivers run in this process, each with the server, store and sources of a worker; all bytes cross real
sockets. Everything from the sender passes one line whose rate all receivers share. Each receiver has an uplink three
times as fast, shared by the receivers that fetch from it. The relay tree is built as at the start of a run, without
measurements. Measures the time until every receiver has every piece, verified and flushed,

- by relays, over the time of one receiver that fetches alone over the slow link in the same round (the bar);
- with all six fetching from the sender, for comparison.

Also shows the lower bound of the narrowest cut, and the processor time, which tells whether this machine was the
bottleneck. A quick run decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import asdict, replace

from benchmarks import report
from benchmarks.common.load import Load
from benchmarks.relay.max_flow import least_seconds
from benchmarks.relay.transfer import FASTER, FULL, NUM_RECEIVERS, QUICK, WAYS, Sent, Sizes, measure
from offbeat.weights.relay_tree import ROOT

TARGET = 1.15


def bound_s(sizes: Sizes) -> float:
    """Returns a lower bound, in seconds, on the time of any way to send a version to six receivers."""
    names, fast = [f"receiver{number}" for number in range(NUM_RECEIVERS)], FASTER * sizes.slow_bytes_per_s
    links = {(ROOT, "slow link"): sizes.slow_bytes_per_s}
    for name in names:
        links[name, f"{name}'s uplink"] = fast
        links["slow link", name] = sizes.slow_bytes_per_s
        links |= {(f"{name}'s uplink", other): fast for other in names if other != name}
    return least_seconds(sizes.num_bytes, links, names)


def ratios(found: dict[str, list[Sent]], way: str) -> list[float]:
    return [sent.seconds / alone.seconds for sent, alone in zip(found[way], found["alone"], strict=True)]


def rows_of(found: dict[str, list[Sent]]) -> list[tuple[str, ...]]:
    def row(way: str) -> tuple[str, ...]:
        def median(figure: str) -> float:
            return statistics.median(getattr(sent, figure) for sent in found[way])

        return (
            way,
            f"{median('seconds'):.2f}",
            f"{statistics.median(ratios(found, way)):.3f}",
            f"{median('slow_link_copies'):.2f}",
            f"{median('depth'):.0f}",
            f"{median('cpu_s') / median('seconds'):.0%}",
        )

    return [row(way) for way in WAYS]


def main() -> None:
    parser = argparse.ArgumentParser(description="One version to six receivers behind one slow link.")
    parser.add_argument("--quick", action="store_true", help="two short rounds: ends within a minute")
    options = parser.parse_args()
    sizes, load = QUICK if options.quick else FULL, Load()
    with report.scratch("relay") as folder:
        found = asyncio.run(measure(folder, sizes))
    bar = report.at_most(TARGET, ratios(found, "relays"), quick=options.quick)
    report.show(
        "relay",
        ("way", "seconds", "over one copy", "copies over the slow link", "depth", "CPU"),
        rows_of(found),
        {"seconds by relays over one copy": replace(bar, holds=None) if options.quick else bar},
        quick=options.quick,
        num_receivers=NUM_RECEIVERS,
        faster=FASTER,
        sizes=asdict(sizes),
        least_seconds=bound_s(sizes),
        **load.shares(),
        sent={way: [asdict(sent) for sent in sents] for way, sents in found.items()},
    )


if __name__ == "__main__":
    main()
