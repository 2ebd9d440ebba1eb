"""Spans of a run's trace.json for the page's time line: who did what when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbeat.launch.run_folder import TRACE

MAX_READ_BYTES = 8 << 20
"""Most bytes that one call of `read` reads."""
MAX_FILE_SPANS = 100_000
"""Most spans in a file to share; of more, it has the longest."""


class Spans:
    """The spans of a trace file, which may still grow. A span is a list: index of its track, index of its name, start
    as wall time, seconds, number of answers or None."""

    def __init__(self, run: Path):
        self._file, self._offset = run / TRACE, 0
        self._lanes: dict[tuple[int, int], int] = {}
        self.tracks: list[str] = []
        self.names: list[str] = []
        self.spans: list[list[Any]] = []

    def read(self) -> bool:
        """Reads on; returns whether there may be more."""
        if not self._file.is_file():
            return False
        with open(self._file, "rb") as file:
            file.seek(self._offset)
            data = file.read(MAX_READ_BYTES)
        end = self._offset
        for line in data.split(b"\n")[:-1]:
            # Only up to the comma: closing the file replaces it by a bracket, and a resume the bracket by a comma.
            event = line.rstrip(b",")
            if event.strip() not in (b"", b"]"):
                self._offset = end + len(event)
                self._take(event)
            end += len(line) + 1
        return len(data) == MAX_READ_BYTES

    def read_all(self) -> None:
        while self.read():
            pass

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            lane = (event["pid"], event["tid"])
            if event["ph"] == "M":
                self._lanes[lane] = _index(self.tracks, str(event["args"]["name"]))
            elif event["ph"] == "X":
                track = self._lanes.get(lane)
                if track is None:
                    track = _index(self.tracks, "other")
                name = _index(self.names, str(event["name"]))
                answers = event.get("args", {}).get("answers")
                start_s, seconds = round(event["ts"] / 1e6, 6), round(event["dur"] / 1e6, 6)
                self.spans.append([track, name, start_s, seconds, answers if isinstance(answers, int) else None])
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # a line that a kill cut short, or the bracket at the beginning

    def since(self, index: int, limit: int) -> dict[str, Any]:
        """Returns up to `limit` spans from number `index` on, with the names of all tracks and spans."""
        return {"tracks": self.tracks, "names": self.names, "spans": self.spans[index : index + limit]}

    def longest(self) -> dict[str, Any]:
        """Returns the longest `MAX_FILE_SPANS` spans, in the order of the file, and the sums of all."""
        kept = self.spans
        if len(kept) > MAX_FILE_SPANS:
            limit = sorted((span[3] for span in kept), reverse=True)[MAX_FILE_SPANS - 1]
            kept = [span for span in kept if span[3] >= limit]
        return {**self.since(0, 0), "spans": kept, "num_left_out": len(self.spans) - len(kept)}


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)
