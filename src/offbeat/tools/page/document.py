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
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

from offbeat.files import write_atomic
from offbeat.ledger.reports import TrajectoryRow
from offbeat.tools.page.run_data import ANSWER_COLUMNS, RunData, chosen_groups
from offbeat.tools.page.timeline import Spans
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


def write_page(run: Path, out: Path, data: RunData) -> dict[str, Any]:
    """Writes the page of a run with its data to the file `out`; returns what the file holds."""
    packed, held = pack(run, data)
    text, _ = document(f"{data.about()['name']} – Offbeat", packed)
    encoded = text.encode()
    write_atomic(out, encoded)
    return {**held, "num_bytes": len(encoded)}


def pack(run: Path, data: RunData) -> tuple[bytes, dict[str, Any]]:
    """Returns a run's data, compressed, and what they hold: `num_answers` of the run, `num_kept` of them, and the
    `stride` between groups that were kept."""
    with open_ledger(run) as ledger:
        rows = ledger.list_trajectories(ALL, "oldest")
    stride = _stride(rows)
    kept = chosen_groups(rows, stride)
    held = {"num_answers": len(rows), "num_kept": len(kept), "stride": stride, "with_text": data.decode is not None}
    spans = Spans(run)
    spans.read_all()
    content = {
        "about": data.about(),
        "metrics": data.surviving_metrics(),
        "events": data.all_events(),
        "ledger": data.ledger(),
        "answers": {"columns": ANSWER_COLUMNS, "rows": [data.row(row) for row in kept], "is_last": True},
        "texts": data.texts([row.task for row in kept], with_history=False),
        "timeline": spans.longest(),
        "file": {**held, "made_at": time.time()},
    }
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(plain, mtime=0), held


def _stride(rows: list[TrajectoryRow]) -> int:
    num_tokens = sum(row.num_tokens for row in rows)
    return max(1, ceil(len(rows) / MAX_ANSWERS), ceil(num_tokens / MAX_TOKENS))
