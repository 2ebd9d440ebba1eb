"""Problems from rows: a JSONL or Parquet file, or a Hugging Face dataset, with the names of the columns to use.

- Every row is checked when the source is opened; an error is one line that names the row.
- A row is held out if the hash of its prompt, as a fraction, is below the share `held_out`. So rows with equal prompts
  stay together, and rows that are added later leave the others where they are. If that holds for no row and the share
  is above 0, the row with the smallest hash is held out.
- Epochs follow one another. With `shuffle`, each has its own order, which depends only on seed and epoch.
- The reward gets all columns of the row but the prompt's as `info`. The answer's column is left out too if it is named
  `answer` and holds text (or nothing).
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from blake3 import blake3

from offbeat.data.prompts import Problem, answer_text, plain, prompt_messages, prompt_text
from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.spelling import suggest

Row = Mapping[str, Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Rows of a file or dataset, by index. Before the first call of `row`, `scan` must have read all rows; `scan` may
    be called again later. Rows are not kept as Python objects, so a few million are fine. A row that cannot be read
    raises `UserError`."""

    @property
    def path(self) -> Path | str:
        """Path of the file or name of the dataset, as the user wrote it."""
        ...

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        """Yields all rows in order. A row may leave out columns that are not in `columns`."""
        ...

    def row(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """Returns where the row at `index` is, such as file and line, for error messages."""
        ...


READERS_OF_PANDAS = {
    ".csv": "read_csv(PATH)",
    ".json": "read_json(PATH)",
    ".tsv": "read_csv(PATH, sep='\\t')",
}
"""Calls with which pandas reads kinds of files that a task does not accept, by suffix."""


def open_file(path: str) -> Rows:
    """Opens a user's .jsonl, .ndjson or .parquet file."""
    readers: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonLines, ".ndjson": JsonLines, ".parquet": ParquetRows}
    file = Path(path)
    if file.suffix not in readers:
        read = READERS_OF_PANDAS.get(file.suffix)
        remedy = f"convert it, as with pandas.{read}.to_json('rows.jsonl', orient='records', lines=True)"
        if read is None:
            remedy = 'a data set on the Hugging Face hub has task.source = "dataset"'
        raise UserError(f"task.path = {path!r}: must be a .jsonl, .ndjson or .parquet file; {remedy}")
    if not file.is_file():
        beside = sorted(p.name for p in file.parent.iterdir()) if file.parent.is_dir() else []
        near = suggest(file.name, beside, "its folder has") if beside else ""
        raise UserError(f"task.path = {path!r}: there is no such file" + (f"; {near}" if near else ""))
    return readers[file.suffix](file)


class JsonLines:
    """Rows of a file with one JSON object per line; blank lines are skipped. If the rows were given from
    Python, `argument` names the argument of the call that gave them; errors then show it instead of the file. None: the
    file is the user's own."""

    def __init__(self, path: Path, argument: str | None = None):
        self.path, self._argument = path, argument
        self._file = path.open("rb")
        self._starts, self._lines = array("q"), array("q")

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        is_first, start = not self._starts, 0
        self._file.seek(0)
        for line, text in enumerate(self._file, 1):
            if text.strip().removeprefix(BYTE_ORDER_MARK):
                if is_first:
                    self._starts.append(start)
                    self._lines.append(line)
                yield self._parse(text, line)
            start += len(text)
        if is_first:
            self._starts.append(start)

    def row(self, index: int) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        text = os.pread(self._file.fileno(), end - start, start)
        return self._parse(text.partition(b"\n")[0], self._lines[index])

    def where(self, index: int) -> str:
        line = self._lines[index]
        return f"{self.path}:{line}" if self._argument is None else f"row {line} of {self._argument}"

    def _parse(self, text: bytes, line: int) -> Row:
        try:
            row = msgspec.json.decode(text.strip().removeprefix(BYTE_ORDER_MARK))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}:{line}: this line is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(
                f"{self.path}:{line}: this line is a JSON {type(row).__name__}; it must be an object, {{...}}"
            )
        return row


class ParquetRows:
    """Rows of a Parquet file, held as a memory-mapped Arrow table."""

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
    """Rows of one split of a Hugging Face dataset; `path` is a saved or downloaded folder, or a name on the hub. If the
    dataset has several configurations, add a colon and the name of one, as in `openai/gsm8k:main`."""

    def __init__(self, path: str, split: str):
        self.path, self.split = path, split
        datasets = import_extra("datasets", "data", "the task source 'dataset'")
        is_away = not Path(path).exists() and not _hub_answers(path)
        try:
            if is_away:  # a copy in the cache will do; without this, the hub is tried again for half a minute
                datasets.config.HF_HUB_OFFLINE = True
            found = _load_dataset(datasets, path, split)
        except Exception as error:  # the hub, codecs and file formats raise errors of many kinds
            if is_away:
                raise UserError(
                    f"task.path = {path!r}: no such folder, and the Hugging Face hub cannot be reached to download it; "
                    "check the network, or give a local folder, such as one that hf download --repo-type dataset "
                    f"{path.partition(':')[0]} --local-dir FOLDER has made on a machine with a network"
                ) from error
            why = " ".join(str(error).split()).replace("Example of usage: ", "")
            if "Config name is missing" in why:
                why = f"{why.partition(' `load_dataset')[0]}, such as task.path = '{path}:NAME'"
            raise UserError(f"task.path = {path!r}: cannot be loaded: {why}") from error
        if isinstance(found, Mapping):
            if split not in found:
                raise UserError(f"task.split = {split!r}: {path} has no such split; {suggest(split, found, 'it has')}")
            found = found[split]
        self._rows = found

    def scan(self, columns: Sequence[str]) -> Iterator[Row]:
        yield from self._rows.select_columns(columns) if {*columns} <= {*self._rows.column_names} else self._rows

    def row(self, index: int) -> Row:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self.path}, {self.split} row {index}"


HUB_TIMEOUT_S = 10.0


def _hub_answers(path: str) -> bool:
    """Whether the Hugging Face hub can be reached, even if it has no such dataset."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(path.partition(":")[0], timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, ValueError):  # no such dataset, or not a name: loading it says so
        return True
    except Exception:  # noqa: BLE001 - the hub's client raises errors of many kinds
        return False
    return True


def _load_dataset(datasets: Any, path: str, split: str) -> Any:
    folder = Path(path)
    if folder.is_dir() and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(path)
    datasets.disable_progress_bars()
    name, _, configuration = (path, "", "") if folder.exists() else path.partition(":")
    return datasets.load_dataset(name, configuration or None, split=split)


DEFAULT_ANSWER = "answer"
"""Default answer column; unlike a column that the user names, it may be missing."""


class FileSource:
    """Source of problems from `rows`. `prompt` (for text), `messages` (for chats) and `answer` are names of columns. If
    `messages` is given, it is used instead of `prompt`. If `answer` is None, problems have no answer. `held_out` is the
    share of rows to hold out."""

    default_reward: str | None = None

    def __init__(
        self,
        rows: Rows,
        *,
        name: str,
        seed: int = 0,
        prompt: str = "prompt",
        messages: str | None = None,
        answer: str | None = DEFAULT_ANSWER,
        chat: bool | None = None,
        held_out: float = 0.05,
        shuffle: bool = True,
    ):
        self.rows, self.name, self.seed, self.chat, self.shuffle = rows, name, seed, chat, shuffle
        self._column, self._is_messages, self._answer = messages or prompt, messages is not None, answer
        self._needed = [self._column] + ([answer] if answer not in (None, DEFAULT_ANSWER) else [])
        hashes = np.array([_hash(self._prompt_of(row, i)) for i, row in enumerate(rows.scan(self._needed))], np.uint64)
        if not len(hashes):
            raise UserError(f"task.path = {str(rows.path)!r}: it has no row; give at least one, with a prompt")
        is_held_out = _choose_held_out(hashes, held_out)
        self._num_held_out = int(is_held_out.sum())
        self._train = np.flatnonzero(~is_held_out)
        # Held-out rows are sorted by hash, so that the first ones are a fair sample; equal prompts count once.
        _, first = np.unique(hashes, return_index=True)
        self._held_out = first[is_held_out[first]]
        if not len(self._train):
            raise UserError(f"task.held_out = {held_out:g}: holds out all {len(hashes)} rows of {name}; lower it")
        self._order = lru_cache(maxsize=2)(self._make_order)  # a step may use two epochs

    def problem(self, ordinal: int) -> Problem:
        epoch, position = divmod(ordinal, len(self._train))
        return self._problem(int(self._train[self._order(epoch)[position]]))

    def held_out(self, count: int) -> list[Problem]:
        return [self._problem(int(index)) for index in self._held_out[:count]]

    def __len__(self) -> int:
        return len(self._train) + self._num_held_out

    @property
    def num_train(self) -> int:
        """Number of rows that are not held out."""
        return len(self._train)

    def columns_without_answer(self) -> list[str]:
        """Returns the columns of the first row if no row has the answer column. Returns an empty list if some row has
        it, or if problems are to have no answer. Only the default answer column may be missing from all rows."""
        if self._answer is None or any(self._answer in row for row in self.rows.scan([self._answer])):
            return []
        return [str(name) for name in self.rows.row(0)]

    def every_prompt(self) -> Iterator[Problem]:
        """Yields all rows in order, including held-out ones, as problems that have only a prompt and a place."""
        for index, row in enumerate(self.rows.scan(self._needed)):
            yield Problem(self._prompt_of(row, index), place=self.rows.where(index))

    def _make_order(self, epoch: int) -> np.ndarray:
        size = len(self._train)
        return permutation(size, f"{self.seed}:{epoch}") if self.shuffle else np.arange(size)

    def _problem(self, index: int) -> Problem:
        row = self.rows.row(index)
        prompt = self._prompt_of(row, index)
        answer = row.get(self._answer) if self._answer else None
        # Rewards with TRL's signature need the answer under its column's name and in its own type, so as `info`.
        is_told = self._answer == DEFAULT_ANSWER and (answer is None or isinstance(answer, str))
        left_out = (self._column, self._answer) if is_told else (self._column,)
        info = {key: plain(value) for key, value in row.items() if key not in left_out}
        return Problem(prompt, answer=answer_text(answer), info=info, place=self.rows.where(index))

    def _prompt_of(self, row: Row, index: int) -> str | list[Mapping[str, Any]]:
        """Checks that a row has the needed columns, and returns its prompt."""
        where = self.rows.where(index)
        for column in self._needed:
            if column not in row:
                raise UserError(f"{where}: the row has no column {column!r}; {suggest(column, row, 'it has')}")
        value, place = row[self._column], f"{where}: {self._column}"
        if isinstance(value, list) and not self._is_messages:
            raise UserError(f"{place} is a list; for chat messages set task.messages = {self._column!r}")
        return prompt_messages(value, place) if self._is_messages else prompt_text(value, place)


def permutation(size: int, key: str) -> np.ndarray:
    """Returns the numbers below `size` in an order that depends only on `key`, not on numpy's version.

    Sorts by a hashed counter (splitmix64), because the streams of numpy's generators may change between releases.
    """
    start = int.from_bytes(blake3(key.encode()).digest(length=8), "little")
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def _choose_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Returns a mask of the rows to hold out, given the hashes of all rows' prompts and the `share` to hold out. If
    `share` is above 0 and not all prompts are equal, at least one row is held out."""
    chosen = hashes < np.uint64(int(share * 2**64))
    if share > 0 and not chosen.any() and hashes.min() != hashes.max():
        chosen = hashes == hashes.min()
    return chosen


def _hash(prompt: str | list[Mapping[str, Any]]) -> int:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int.from_bytes(blake3(text.encode(errors="surrogatepass")).digest(length=8), "little")
