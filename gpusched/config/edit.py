"""Changes values in a TOML text and leaves every other byte as it is: comments, order, spelling.

Each change is made where the key is written, in whichever of TOML's forms. Afterwards `tomllib` must read exactly what
was wanted: where this module does not manage that, it changes nothing and says so.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from gpusched.config.toml_lines import Entry, Key, elements_of, entries_of
from gpusched.errors import Refused
from gpusched.model.value import Value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class KeyChange(Value):
    """One key, and its value from now on; None removes it, with all that is below it."""

    key: Key
    value: Any


def with_changes(text: str, changes: Iterable[KeyChange]) -> str:
    """The text with these changes, made in order. Raises: Refused where its form cannot be edited safely.

    Args: text: valid TOML, with any line ends.
    """
    wanted = tomllib.loads(text)
    for change in changes:
        wanted = changed(wanted, change)
        text = _Editor(text).made(change)
        try:
            is_right = sections(tomllib.loads(text)) == sections(wanted)
        except tomllib.TOMLDecodeError:
            is_right = False
        if not is_right:
            path = ".".join(change.key)
            raise Refused(f"{path} is written in a form that cannot be changed by command", "change it in the file")
    return text


def sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without empty sections: a section without anything in it says nothing."""
    return {name: content for name, content in document.items() if content != {}}


def changed(document: Mapping[str, Any], change: KeyChange) -> dict[str, Any]:
    """The document with one change; tables on the way to its key are made."""
    first, *rest = change.key
    copy = dict(document)
    if rest:
        below = copy.get(first, {})
        if change.value is not None or first in copy:
            copy[first] = changed(below, KeyChange(tuple(rest), change.value))
    elif change.value is None:
        copy.pop(first, None)
    else:
        copy[first] = change.value
    return copy


class _Editor:
    """One text, and one change of it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._entries = entries_of(text)
        self._newline = "\r\n" if "\r\n" in text else "\n"

    def made(self, change: KeyChange) -> str:
        if change.value is None:
            return self._without(change.key)
        entry = self._pair(change.key)
        if entry is not None:
            return self._replaced(entry, change.value)
        if isinstance(change.value, Mapping) and self._below(change.key):
            return self._merged(change.key, change.value)
        return self._added(change.key, change.value)

    def _pair(self, key: Key) -> Entry | None:
        return next((one for one in self._entries if one.key == key and one.value is not None), None)

    def _header(self, key: Key) -> Entry | None:
        return next((one for one in self._entries if one.key == key and one.value is None), None)

    def _below(self, key: Key) -> list[Entry]:
        """Entries of this key and of everything in it."""
        return [one for one in self._entries if one.key[: len(key)] == key]

    # --- change --------------------------------------------------------------------------------

    def _replaced(self, entry: Entry, value: Any) -> str:
        assert entry.value is not None
        old = self._text[entry.value : entry.end]
        read = tomllib.loads(f"v = {old}")["v"]
        if read == value and type(read) is type(value):
            return self._text
        if isinstance(read, list) and isinstance(value, list) and "\n" in old:
            return self._with_elements(entry.value, read, value)
        return self._text[: entry.value] + written(value) + self._text[entry.end :]

    def _with_elements(self, at: int, read: list[Any], value: list[Any]) -> str:
        """An array over several lines: elements come and go, its comments and the rest stay."""
        kept = [one for one in read if one in value]
        added = value[len(kept) :]
        spans = elements_of(self._text, at)
        if kept + added != value or len(set(map(str, read))) != len(read) or not kept:
            end = next(entry.end for entry in self._entries if entry.value == at)
            return self._text[:at] + written(value) + self._text[end:]
        text = self._text
        last = next(span for one, span in zip(reversed(read), reversed(spans), strict=True) if one in value)
        if added:
            indent = _indent(text, last[0])
            more = "".join(f",{self._newline}{indent}{written(one)}" for one in added)
            text = text[: last[1]] + more + text[last[1] :]
        for one, (start, end) in zip(reversed(read), reversed(spans), strict=True):
            if one not in value:
                if start > last[0] and added:
                    # What was inserted came before it.
                    start, end = start + len(more), end + len(more)
                text = _without_part(text, start, end)
        return text

    def _merged(self, key: Key, value: Mapping[str, Any]) -> str:
        """A separate table, or dotted keys: change what differs below."""
        depth = len(key)
        there = {one.key[depth]: None for one in self._below(key) if len(one.key) > depth}
        text = self._text
        for name in there:
            if name not in value:
                text = _Editor(text).made(KeyChange((*key, name), None))
        for name, one in value.items():
            text = _Editor(text).made(KeyChange((*key, name), one))
        return text

    # --- add -----------------------------------------------------------------------------------

    def _added(self, key: Key, value: Any) -> str:
        for length in range(len(key) - 1, 0, -1):
            above = self._pair(key[:length])
            if above is not None:
                return self._added_inline(above, key[length:], value)
        parent = key[:-1]
        header = self._header(parent)
        if header is not None:
            if isinstance(value, Mapping) and len(key) == 2:
                return self._new_table(key, value)
            return self._added_line(self._last_line_of(parent) or header, key[len(parent) :], value)
        for length in range(len(key) - 1, 0, -1):
            beside = [one for one in self._below(key[:length]) if len(one.table) < length and one.value is not None]
            if beside:
                # The table was made by dotted keys, and TOML forbids to open it a second time.
                return self._added_line(beside[-1], key[len(beside[-1].table) :], value)
        if len(key) == 2 and isinstance(value, Mapping):
            return self._new_table(key, value)
        return self._new_table(parent, {key[-1]: value})

    def _added_inline(self, above: Entry, key: Key, value: Any) -> str:
        assert above.value is not None
        pair = f"{'.'.join(map(written_key, key))} = {written(value)}"
        inside = [one for one in self._below(above.key) if one.depth == above.depth + 1 and one.start > above.start]
        if inside:
            at = inside[-1].end
            return f"{self._text[:at]}, {pair}{self._text[at:]}"
        return f"{self._text[: above.value]}{{ {pair} }}{self._text[above.end :]}"

    def _added_line(self, after: Entry, key: Key, value: Any) -> str:
        """A line below this entry, indented like it."""
        at = self._line_end(after.end)
        indent = _indent(self._text, after.start)
        line = f"{indent}{'.'.join(map(written_key, key))} = {written(value)}{self._newline}"
        before = self._text[:at]
        return before + ("" if before.endswith("\n") else self._newline) + line + self._text[at:]

    def _new_table(self, key: Key, value: Mapping[str, Any]) -> str:
        lines = [
            f"[{'.'.join(map(written_key, key))}]",
            *(f"{written_key(name)} = {written(one)}" for name, one in value.items()),
        ]
        block = "".join(line + self._newline for line in lines)
        beside = [one for one in self._entries if one.depth == 0 and one.table[: len(key) - 1] == key[:-1]]
        if not beside or not key[:-1]:
            beside = [one for one in self._entries if one.depth == 0]
        at = self._line_end(beside[-1].end) if beside else len(self._text)
        before, after = self._text[:at], self._text[at:]
        if before and not before.endswith("\n"):
            before += self._newline
        gap = self._newline if before else ""
        return before + gap + block + after

    def _last_line_of(self, table: Key) -> Entry | None:
        lines = [one for one in self._entries if one.table == table and one.depth == 0 and one.value is not None]
        return lines[-1] if lines else None

    # --- remove --------------------------------------------------------------------------------

    def _without(self, key: Key) -> str:
        found = self._below(key)
        if not found:
            return self._text
        text = self._text
        for entry in reversed([one for one in found if not self._is_inside(one, found)]):
            if entry.value is None:
                text = self._without_table(text, entry)
            elif entry.depth:
                text = _without_part(text, entry.start, entry.end)
            else:
                at, end = _line_start(text, entry.start), self._line_end(entry.end)
                text = text[:at] + text[end:]
        parent = key[:-1]
        if len(parent) > 1 and not any(one.key[: len(parent)] == parent for one in entries_of(text)):
            # Its last key made the table, which stays, empty.
            return self._emptied(found[0], parent)
        return text

    def _emptied(self, entry: Entry, parent: Key) -> str:
        if entry.value is None:
            last = self._last_line_of(entry.key) or entry
            return f"{self._text[: entry.start]}[{'.'.join(map(written_key, parent))}]{self._text[last.end :]}"
        if len(entry.table) >= len(parent) or entry.depth:
            return self._text
        name = ".".join(map(written_key, parent[len(entry.table) :]))
        return f"{self._text[: entry.start]}{name} = {{}}{self._text[entry.end :]}"

    def _is_inside(self, entry: Entry, others: Iterable[Entry]) -> bool:
        """Whether it goes with another of these: in its value, or below its header."""
        return any(
            one is not entry
            and (
                (one.value is not None and one.value <= entry.start < one.end)
                or (
                    one.value is None and entry.value is not None and entry.table == one.key and entry.start > one.start
                )
            )
            for one in others
        )

    def _without_table(self, text: str, header: Entry) -> str:
        """Cut a header with its keys and the comment right above it; what is above the next header stays with that."""
        last = self._last_line_of(header.key) or header
        start, end = _line_start(text, header.start), self._line_end(last.end)
        while start and (line := text[_line_start(text, start - 1) : start].strip()).startswith("#"):
            if not line:
                break
            start = _line_start(text, start - 1)
        if start and not text[_line_start(text, start - 1) : start].strip():
            # The blank line that set it apart.
            start = _line_start(text, start - 1)
        elif not start and end < len(text) and not text[end : self._line_end(end)].strip():
            end = self._line_end(end)
        return text[:start] + text[end:]

    def _line_end(self, at: int) -> int:
        """Offset after the end of the line."""
        end = self._text.find("\n", at)
        return len(self._text) if end < 0 else end + 1


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _indent(text: str, at: int) -> str:
    line = text[_line_start(text, at) : at]
    return line if not line.strip() else ""


def _without_part(text: str, start: int, end: int) -> str:
    """Cut one element of a list or an inline table, with one comma; and its line, if it was alone there."""
    after = re.match(r"[ \t]*,[ \t]*", text[end:])
    if after is not None:
        end += after.end()
    else:
        before = re.search(r",[ \t]*$", text[:start])
        if before is not None:
            start = before.start()
    line, rest = _line_start(text, start), text[end:].partition("\n")[0]
    if not text[line:start].strip() and (not rest.strip() or rest.lstrip().startswith("#")) and "\n" in text[end:]:
        return text[:line] + text[end:].partition("\n")[2]
    return text[:start] + text[end:]


def written_key(name: str) -> str:
    """A key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    # TOML's basic strings have JSON's escapes, and ask for one more.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def written(value: Any) -> str:
    """A value on one line, in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{written_key(key)} = {written(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"{value!r} has no form in TOML")
