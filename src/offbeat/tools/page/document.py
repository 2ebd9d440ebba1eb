"""The page as one HTML document: style, scripts and, in a file to share, the run's data, all within it.

The scripts are modules that import each other. In a document they are one module, in the order of `MODULES`, without
their imports and exports; so no two of them may use one name at their top level. The document's policy allows the two
scripts and the style by their digests and nothing else, so that nothing in the data can run or load anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

from offbeat.files import write_atomic
from offbeat.launch.run_folder import METRICS
from offbeat.ledger.reports import TrajectoryRow
from offbeat.tools.page.metric_history import HELD_OUT, MetricHistory
from offbeat.tools.page.run_data import ANSWER_COLUMNS, RunData, chosen_groups, plain
from offbeat.tools.page.timeline import MAX_FILE_SPANS, Spans
from offbeat.tools.trajectories import ALL, open_ledger

MODULES = ("text", "store", "charts", "learning", "answers", "staleness", "swarm", "events", "timeline", "main")
"""Names of our own scripts, each after those that it imports."""
IMPORT = re.compile(r'^import [^;]*? from "\./[a-z]+\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)
MAX_ANSWERS = 40_000
MAX_TOKENS = 1_000_000
"""Most answers, and tokens of answers, that a file holds; of a longer run, it holds every second group, or third ..."""


@cache
def _asset(name: str) -> str:
    return (resources.files("offbeat.tools.page") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    return "".join(EXPORT.sub("", IMPORT.sub("", _asset(f"{name}.js"))) for name in MODULES)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def document(title: str, data: bytes | None) -> tuple[str, str]:
    """Returns the HTML document and its Content-Security-Policy. `data` is the run's data for a file to share; None:
    the page loads them from the server that it came from."""
    library, script = _asset("uPlot.iife.min.js"), _script()
    style = _asset("uPlot.min.css") + _asset("page.css")
    connect = "'self'" if data is None else "'none'"
    policy = (
        f"default-src 'none'; script-src {_digest(library)} {_digest(script)}; style-src {_digest(style)}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    block = (
        "" if data is None else f'<script type="text/plain" id="run-data">{base64.b64encode(data).decode()}</script>'
    )
    parts = {
        "policy": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "title": html.escape(title),
        "style": style,
        "data": block,
        "library": library,
        "script": script,
    }
    return re.sub(r"\{\{([a-z]+)\}\}", lambda found: parts[found[1]], _asset("page.html")), policy


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Returns runs by the names that the page has for them: those of their folders, numbered where alike."""
    found: dict[str, Path] = {}
    for path in paths:
        name = path.absolute().name
        same = sum(known.absolute().name == name for known in found.values())
        found[f"{name} ({same + 1})" if same else name] = path
    return found


def write_page(out: Path, runs: Sequence[RunData]) -> dict[str, Any]:
    """Writes the page of runs with their data to the file `out`; returns what the file holds."""
    names = {path: name for name, path in names_of([data.path for data in runs]).items()}
    packed, held = pack({names[data.path]: data for data in runs})
    text, _ = document(f"{', '.join(names.values())} – Offbeat", packed)
    encoded = text.encode()
    write_atomic(out, encoded)
    return {**held, "num_bytes": len(encoded)}


def pack(runs: Mapping[str, RunData]) -> tuple[bytes, dict[str, Any]]:
    """Returns the data of runs, compressed, and what they hold: `num_answers` of the runs, and `num_kept` of them."""
    parts = [_content(name, data, len(runs)) for name, data in runs.items()]
    files = [part["file"] for part in parts]
    held = {name: sum(file[name] for file in files) for name in ("num_answers", "num_kept")}
    plain = json.dumps({"runs": parts}, separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(plain, mtime=0), {**held, "with_text": all(file["with_text"] for file in files)}


def _content(name: str, data: RunData, num_runs: int) -> dict[str, Any]:
    """Returns what a file of `num_runs` runs holds of one."""
    with open_ledger(data.path) as ledger:
        rows = ledger.list_trajectories(ALL, "oldest")
    stride = _stride(rows, num_runs)
    kept = chosen_groups(rows, stride)
    spans, history = Spans(data.path), MetricHistory(data.path / METRICS)
    spans.read_all()
    history.read_all()
    curves = history.thinned([*history.names, HELD_OUT]) | plain(history.latest()) | {"names": history.names}
    newest = {row.worker: (row.task, row.last_version) for row in rows}
    return {
        "about": {**data.about(), "name": name},
        "metrics": curves,
        "events": data.all_events(),
        "ledger": {**data.ledger(), "makers": data.makers(newest)},
        "answers": {"columns": ANSWER_COLUMNS, "rows": [data.row(row) for row in kept]},
        "texts": data.texts([row.task for row in kept], with_history=False),
        "timeline": spans.window(limit=MAX_FILE_SPANS),
        "file": {
            "num_answers": len(rows),
            "num_kept": len(kept),
            "stride": stride,
            "with_text": data.decode is not None,
            "made_at": time.time(),
        },
    }


def _stride(rows: list[TrajectoryRow], num_runs: int) -> int:
    num_tokens = sum(row.num_tokens for row in rows)
    return max(1, ceil(num_runs * len(rows) / MAX_ANSWERS), ceil(num_runs * num_tokens / MAX_TOKENS))
