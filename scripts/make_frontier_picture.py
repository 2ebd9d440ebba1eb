"""Draws docs/planning-frontier.png: the figure of `offbeat plan --frontier` for the cluster and the model on the page.

    python scripts/make_frontier_picture.py

Needs a Chromium, which renders the SVG: `chromium` on the path, or another by `--browser`.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.workload_file import load_workload
from offbeat.planner.report.frontier import HEIGHT, WIDTH, figure, homogeneous, mixed, split_by_class

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "planning"
PICTURE = ROOT / "docs" / "planning-frontier.png"
SCALE = 2
WITHIN_S = 120


def svg() -> str:
    inventory = load_inventory(EXAMPLES / "cluster_hex_56.toml")
    workload = replace(load_workload(EXAMPLES / "workload_hex_7b.toml"), any_trainer=False)
    fleets, split = homogeneous(inventory, workload), split_by_class(inventory, workload)
    return figure(f"{workload.model.name}: cost against throughput", mixed(inventory, workload), fleets, split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium")
    browser = parser.parse_args().browser
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        page.write_text(f'<body style="margin:0;background:#fff">{svg()}</body>', encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}", f"--screenshot={PICTURE}"]
        subprocess.run([browser, *words, page.as_uri()], check=True, timeout=WITHIN_S)
    print(PICTURE)


if __name__ == "__main__":
    main()
