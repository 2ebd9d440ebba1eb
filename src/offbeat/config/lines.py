"""Says on which line of a TOML file each key stands, so that an error can point there.

It reads text that `tomllib` has already accepted, so it need not judge, only count (and never hang): it knows strings,
comments, tables, arrays of tables and inline tables. A key that it misses costs an error its line number, nothing more.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]
"""A key's place, such as ("task", 0, "level")."""

TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''[\s\S]*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{},=\n]"
    r"""|[^\s\[\]{},=#"']+""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, of every key and table header."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str):
        self.tokens: list[tuple[str, int]] = []
        line, seen = 1, 0
        for match in TOKEN.finditer(text):
            line += text.count("\n", seen, match.start())
            seen = match.start()
            if not match.group().startswith("#"):
                self.tokens.append((match.group(), line))
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.table_counts: dict[Path, int] = {}

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            if token == "\n":
                self.at += 1
            elif token == "[":
                table = self._header()
                self.lines.setdefault(table, line)
            else:
                self._pair(table)
        return self.lines

    def _header(self) -> Path:
        brackets = 2 if self._peek(1) == "[" else 1
        self.at += brackets
        names = self._key("]") or [""]
        self.at += brackets
        parent = self._inside(names[:-1])
        path = (*parent, names[-1])
        if brackets == 1:
            return self._inside(names)
        count = self.table_counts.get(path, 0)
        self.table_counts[path] = count + 1
        return (*path, count)

    def _inside(self, names: list[str]) -> Path:
        """A table's path; a name that stands for an array of tables means its latest one."""
        path: Path = ()
        for name in names:
            path = (*path, name)
            if path in self.table_counts:
                path = (*path, self.table_counts[path] - 1)
        return path

    def _pair(self, table: Path) -> None:
        line = self.tokens[self.at][1]
        path = (*table, *self._key("="))
        self.at += 1
        self.lines.setdefault(path, line)
        self._value(path)

    def _key(self, until: str) -> list[str]:
        names: list[str] = []
        while self._peek() not in (until, None):
            token = self.tokens[self.at][0]
            self.at += 1
            if token[0] in "\"'":
                names.append(token[1:-1])
            else:
                names += [name for name in token.split(".") if name]
        return names

    def _value(self, path: Path) -> None:
        if self._peek() in ("[", "{"):
            closing = "]" if self._peek() == "[" else "}"
            self.at += 1
            index = 0
            while self._peek() not in (closing, None):
                if self._peek() in (",", "\n", "}"):  # valid TOML has no stray brace; passing one keeps us moving
                    index += self._peek() == ","
                    self.at += 1
                elif closing == "}":
                    self._pair(path)
                else:
                    self.lines[(*path, index)] = self.tokens[self.at][1]
                    self._value((*path, index))
            self.at += 1
            return
        while self._peek() not in ("\n", ",", "]", "}", None):
            self.at += 1

    def _peek(self, ahead: int = 0) -> str | None:
        return self.tokens[self.at + ahead][0] if self.at + ahead < len(self.tokens) else None
