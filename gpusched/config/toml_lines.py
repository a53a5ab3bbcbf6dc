"""Where each key is in a TOML text: `tomllib` returns values without lines.

Only for texts that `tomllib` has parsed, so nothing is checked here.
"""

from __future__ import annotations

from bisect import bisect_left

Key = tuple[str, ...]


def lines_of(text: str) -> dict[Key, int]:
    """Line, counted from 1, of every table header and key, including those in inline tables."""
    return _Reader(text).read()


class _Reader:
    """Scans the text once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found: dict[Key, int] = {}
        self._ends = [at for at, char in enumerate(text) if char == "\n"]

    def read(self) -> dict[Key, int]:
        table: Key = ()
        while self._skip(" \t\r\n"):
            if self._peek() == "#":
                self._skip_comment()
            elif self._peek() == "[":
                self._skip("[")
                line = self._line()
                table = self._key()
                self._found.setdefault(table, line)
                self._skip("]")
            else:
                self._pair(table)
        return self._found

    def _pair(self, table: Key) -> None:
        line = self._line()
        name = (*table, *self._key())
        # A dotted key makes the tables that it goes through.
        for length in range(len(table) + 1, len(name) + 1):
            self._found.setdefault(name[:length], line)
        self._skip(" \t")
        self._at += 1  # the equals sign
        self._skip(" \t")
        self._value(name)

    def _key(self) -> Key:
        parts = []
        while True:
            self._skip(" \t")
            if self._peek() in "\"'":
                parts.append(self._string())
            else:
                begin = self._at
                while self._peek() and self._peek() not in " \t.=]\r\n":
                    self._at += 1
                parts.append(self._text[begin : self._at])
            self._skip(" \t")
            if self._peek() != ".":
                return tuple(parts)
            self._at += 1

    def _value(self, name: Key) -> None:
        first = self._peek()
        if first in "\"'":
            self._string()
        elif first == "[":
            self._at += 1
            while self._skip_blanks() and self._peek() != "]":
                self._value(name)
                self._skip_blanks()
                self._skip(",")
            self._at += 1
        elif first == "{":
            self._at += 1
            while self._skip_blanks() and self._peek() != "}":
                self._pair(name)
                self._skip_blanks()
                self._skip(",")
            self._at += 1
        else:
            while self._peek() and self._peek() not in ",]}#\r\n":
                self._at += 1
            while self._text[self._at - 1] in " \t":
                self._at -= 1

    def _string(self) -> str:
        """Contents of a string; only common escapes are resolved."""
        quote = self._peek()
        if self._text.startswith(quote * 3, self._at):
            return self._long_string(quote * 3)
        begin = self._at + 1
        self._at = begin
        while self._peek() != quote:
            self._at += 2 if self._peek() == "\\" and quote == '"' else 1
        content = self._text[begin : self._at]
        self._at += 1
        return _unescaped(content) if quote == '"' else content

    def _long_string(self, quotes: str) -> str:
        begin = self._at + 3
        self._at = begin
        while not self._text.startswith(quotes, self._at):
            self._at += 2 if self._peek() == "\\" and quotes[0] == '"' else 1
        content = self._text[begin : self._at]
        self._at += 3
        # Up to two more quotes belong to the text itself.
        self._skip(quotes[0])
        return content

    def _skip_blanks(self) -> bool:
        while self._skip(" \t\r\n") and self._peek() == "#":
            self._skip_comment()
        return self._at < len(self._text)

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _skip(self, characters: str) -> bool:
        """Skip these characters; returns whether anything is left."""
        while self._at < len(self._text) and self._text[self._at] in characters:
            self._at += 1
        return self._at < len(self._text)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _line(self) -> int:
        return bisect_left(self._ends, self._at) + 1


def _unescaped(content: str) -> str:
    if "\\" not in content:
        return content
    # Keys with escapes are rare enough to ask the real parser.
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    (key,) = tomllib.loads(f'"{content}" = 0')
    return str(key)
