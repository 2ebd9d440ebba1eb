"""Rows of files and data sets, read in one way: by index, with a name for the place of each.

`scan` goes over all rows once, checks that they can be read, and must come first; `row` then fetches any of them. Files
are not held in memory as Python objects, so a few million rows are fine. A row that cannot be read is a `UserError`
with its file and line.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.spelling import suggest

Row = Mapping[str, Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rows(Protocol):
    @property
    def path(self) -> Path | str:
        """Where the rows come from, as the user named it."""
        ...

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with at least these columns where the row has them."""
        ...

    def row(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """The place of a row, as users look it up."""
        ...


def open_file(path: str) -> Rows:
    """A .jsonl or .parquet file."""
    readers: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonLines, ".ndjson": JsonLines, ".parquet": ParquetRows}
    file = Path(path)
    if file.suffix not in readers:
        raise UserError(f"task.path = {path!r}: allowed .jsonl and .parquet files; for others use source = 'dataset'")
    if not file.is_file():
        near = suggest(file.name, sorted(p.name for p in file.parent.iterdir())) if file.parent.is_dir() else ""
        raise UserError(f"task.path = {path!r}: there is no such file" + (f"; {near}" if near else ""))
    return readers[file.suffix](file)


class JsonLines:
    """A file with one JSON object a line; blank lines are skipped. Remembers where each row begins."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("rb")
        self._starts, self._lines = array("q"), array("q")

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        start = 0
        for line, text in enumerate(self._file, 1):
            if text.strip().removeprefix(BYTE_ORDER_MARK):
                self._starts.append(start)
                self._lines.append(line)
                yield self._parse(text, line)
            start += len(text)
        self._starts.append(start)

    def row(self, index: int) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        text = os.pread(self._file.fileno(), end - start, start)
        return self._parse(text.partition(b"\n")[0], self._lines[index])

    def where(self, index: int) -> str:
        return f"{self.path}:{self._lines[index]}"

    def _parse(self, text: bytes, line: int) -> Row:
        try:
            row = msgspec.json.decode(text.strip().removeprefix(BYTE_ORDER_MARK))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}:{line}: not a line of JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{self.path}:{line}: a JSON {type(row).__name__}; every line must be an object, {{...}}")
        return row


class ParquetRows:
    """A Parquet file, held as an Arrow table."""

    def __init__(self, path: Path):
        self.path = path
        parquet = import_extra("pyarrow.parquet", "data", "reading Parquet files")
        arrow = import_extra("pyarrow", "data", "reading Parquet files")
        try:
            self._table = parquet.read_table(path, memory_map=True)
        except (arrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a Parquet file that can be read: {' '.join(str(error).split())}") from error

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        table = self._table.select(columns) if {*columns} <= {*self._table.column_names} else self._table
        for batch in table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def row(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self.path}, row {index}"


class DatasetRows:
    """One split of a Hugging Face dataset: a folder that was saved or downloaded, or a name on the hub."""

    def __init__(self, path: str, split: str):
        self.path, self.split = path, split
        datasets = import_extra("datasets", "data", "the task source 'dataset'")
        try:
            found = _load_dataset(datasets, path, split)
        except Exception as error:  # the hub, scripts, codecs and file formats raise what they like
            raise UserError(f"task.path = {path!r}: cannot be loaded: {' '.join(str(error).split())}") from error
        if isinstance(found, Mapping):
            if split not in found:
                raise UserError(f"task.split = {split!r}: {path} has no such split; {suggest(split, found)}")
            found = found[split]
        self._rows = found

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        yield from self._rows.select_columns(columns) if {*columns} <= {*self._rows.column_names} else self._rows

    def row(self, index: int) -> Row:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.path}, {self.split} row {index}"


def _load_dataset(datasets: Any, path: str, split: str) -> Any:
    folder = Path(path)
    if folder.is_dir() and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(path)
    datasets.disable_progress_bars()
    return datasets.load_dataset(path, split=split)
