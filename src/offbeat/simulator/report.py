"""What a simulation found: figures, a text for people, a trace and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.files import write_atomic
from offbeat.simulator.simulation import Simulation, Totals

STATES = ("busy", "no work", "version", "calls", "gone")
COLOURS = {
    "busy": "#3b7dd8",
    "no work": "#d9dce1",
    "version": "#d8a02b",
    "calls": "#9b6bc9",
    "gone": "#c8401f",
    "train": "#3b7dd8",
    "wait": "#d9dce1",
    "publish": "#d8a02b",
}


def figures(simulation: Simulation) -> dict[str, Any]:
    """Returns the figures of a simulation, after its warm-up, as plain data."""
    start, end = simulation.start, simulation.end
    seconds = end.at_s - start.at_s
    if not end.num_steps:
        return {"steps": 0, "seconds": end.at_s, "trained_tokens": 0}
    by_age = end.by_staleness - start.by_staleness
    trained = end.num_trained - start.num_trained
    dollars = end.dollars - start.dollars
    rate = 1 / seconds if seconds > 0 else 0.0
    return {
        "steps": end.num_steps,
        "seconds": end.at_s,
        "counted_steps": end.num_steps - start.num_steps,
        "counted_seconds": seconds,
        "samples_per_s": (end.num_answers - start.num_answers) * rate,
        "generated_tokens_per_s": (end.num_generated - start.num_generated) * rate,
        "delivered_tokens_per_s": (end.num_delivered - start.num_delivered) * rate,
        "trained_tokens_per_s": trained * rate,
        "trained_tokens": trained,
        "masked_tokens": end.num_masked - start.num_masked,
        "staleness": sum(age * count for age, count in by_age.items()) / max(trained, 1),
        "tokens_by_staleness": {str(age): by_age[age] for age in sorted(by_age)},
        "answers_over_bound": end.num_over - start.num_over,
        "wasted_tokens": {cause: count for cause, count in sorted((end.wasted - start.wasted).items())},
        "preemptions": end.num_preempted - start.num_preempted,
        "prefilled_tokens": end.num_prefilled - start.num_prefilled,
        "trainer": _shares({k: end.trainer[k] - start.trainer[k] for k in ("train", "wait", "publish")}),
        "workers": {name: _shares(_difference(end, start, name)) for name in end.seconds},
        "coordinator_busy": (end.coordinator_busy_s - start.coordinator_busy_s) * rate,
        "dollars_per_million_trained_tokens": 1e6 * dollars / trained if trained else None,
        "groups_dropped": dict(sorted(simulation.ledger.num_groups_dropped.items())),
        "over_provision": [[round(at_s, 3), choice.factor] for at_s, choice in simulation.choices],
        "events": simulation.events.num_done,
    }


def _difference(end: Totals, start: Totals, name: str) -> dict[str, float]:
    before: Mapping[str, float] = start.seconds.get(name, {})
    return {str(state): end.seconds[name][state] - before.get(state, 0.0) for state in STATES}


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {state: value / total if total else 0.0 for state, value in seconds.items()}


def to_json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=2)


def to_text(found: Mapping[str, Any], title: str) -> str:
    """Returns the figures for people."""
    if not found["steps"]:
        return (
            f"{title}\n  No step was finished: no batch became complete. The workers that are left may be unable to "
            "take the tasks that are missing."
        )
    lines = [
        title,
        f"  {found['steps']} steps in {_time(found['seconds'])}; figures of the last {found['counted_steps']}, "
        f"{_time(found['counted_seconds'])}",
        "",
        f"  samples trained   {found['samples_per_s']:>12,.2f} /s",
        f"  tokens generated  {found['generated_tokens_per_s']:>12,.0f} /s",
        f"         delivered  {found['delivered_tokens_per_s']:>12,.0f} /s",
        f"         trained    {found['trained_tokens_per_s']:>12,.0f} /s",
    ]
    price = found["dollars_per_million_trained_tokens"]
    if price:
        lines.append(f"  price             {price:>12,.3f} $ per million trained tokens")
    lines += ["", "  time                   " + "".join(f"{state:>10}" for state in STATES)]
    for name, shares in found["workers"].items():
        lines.append(f"  {_cut(name, 22):<22} " + "".join(f"{shares[state]:>10.1%}" for state in STATES))
    trainer = found["trainer"]
    lines.append(
        f"  trainer: trains {trainer['train']:.1%}, waits {trainer['wait']:.1%}, publishes {trainer['publish']:.1%}"
    )
    total = max(found["trained_tokens"], 1)
    ages = ", ".join(f"{age}: {count / total:.1%}" for age, count in found["tokens_by_staleness"].items())
    lines += ["", f"  staleness {found['staleness']:.2f} on average ({ages})"]
    lines.append(f"  answers with tokens over the bound: {found['answers_over_bound']:,}")
    masked, wasted = found["masked_tokens"], found["wasted_tokens"]
    causes = [f"too old {masked:,}"] * bool(masked) + [f"{cause} {count:,}" for cause, count in wasted.items()]
    lines.append(f"  tokens not trained: {', '.join(causes) or 'none'}")
    if found["preemptions"]:
        lines.append(f"  preemptions for want of KV room: {found['preemptions']:,}")
    if found["coordinator_busy"] > 0.005:
        lines.append(f"  coordinator busy: {found['coordinator_busy']:.1%}")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def write_trace(simulation: Simulation, path: Path) -> None:
    """Writes the spans as a trace for Perfetto or chrome://tracing."""
    tracks = {name: number for number, name in enumerate(sorted({span[0] for span in simulation.spans}))}
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in tracks.items()
    ]
    rows += [
        {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": tracks[track],
            "ts": round(start_s * 1e6, 1),
            "dur": round((end_s - start_s) * 1e6, 1),
        }
        for track, name, start_s, end_s in simulation.spans
    ]
    body = ",\n".join(json.dumps(row) for row in rows)
    write_atomic(path, f"[\n{body}\n]\n".encode())


WIDTH, LEFT, ROW, BAR = 860, 190, 30, 18


def picture(found: Mapping[str, Any], title: str) -> str:
    """Returns an SVG: the time of each class of workers and of the trainer by what they did, and the staleness of the
    trained tokens."""
    rows = [*found["workers"].items(), ("trainer", found["trainer"])]
    ages = found["tokens_by_staleness"]
    height = 120 + ROW * (len(rows) + len(ages) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="13" fill="#3a3f47"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="16" y="26" font-size="16">{_escaped(title)}</text>',
        f'<text x="16" y="48">{found["trained_tokens_per_s"]:,.0f} tokens trained per second, '
        f"{found['samples_per_s']:,.2f} samples</text>",
    ]
    y, room = 72, WIDTH - LEFT - 70
    for name, shares in rows:
        parts.append(f'<text x="16" y="{y + 14}">{_escaped(_cut(name, 24))}</text>')
        x = float(LEFT)
        for state, share in shares.items():
            if share > 0:
                hint = f"{state}: {share:.1%}"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{share * room:.1f}" height="{BAR}" fill="{COLOURS[state]}">'
                    f"<title>{hint}</title></rect>"
                )
                x += share * room
        first = next(iter(shares))
        parts.append(f'<text x="{LEFT + room + 8}" y="{y + 14}">{shares[first]:.0%}</text>')
        y += ROW
    x = float(LEFT)
    for state in (*STATES, "train", "wait", "publish"):
        parts.append(f'<rect x="{x:.0f}" y="{y}" width="10" height="10" fill="{COLOURS[state]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{y + 10}" font-size="11">{state}</text>')
        x += 24 + 7 * len(state)
    y += ROW + 10
    total = max(sum(ages.values()), 1)
    for age, count in ages.items():
        share = count / total
        parts.append(f'<text x="16" y="{y + 14}">staleness {age}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{share * room:.1f}" height="{BAR}" fill="#8fb8e8"/>')
        parts.append(f'<text x="{LEFT + share * room + 8:.1f}" y="{y + 14}">{share:.1%}</text>')
        y += ROW
    return "".join([*parts, "</svg>\n"])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
