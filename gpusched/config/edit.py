"""Changes values in a TOML text with tomlkit, and leaves comments, order and spelling of the rest.

Afterwards `tomllib` must read exactly what was wanted: where it does not, nothing is changed, and the error says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.items import AoT, Array, InlineTable, Item, Null, Table, Whitespace

from gpusched.config.document import KeyChange, changed
from gpusched.config.toml_lines import Key
from gpusched.errors import Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Body = list[tuple[Any, Item]]


def with_changes(text: str, changes: Iterable[KeyChange]) -> str:
    """The text with these changes, made in order. Raises: Refused where its form cannot be edited safely.

    Args: text: valid TOML, with any line ends.
    """
    wanted = tomllib.loads(text)
    for change in changes:
        for step in _steps(wanted, (), change):
            wanted = changed(wanted, step)
            text = _edited(text, step)
            try:
                is_right = sections(tomllib.loads(text)) == sections(wanted)
            except tomllib.TOMLDecodeError:
                is_right = False
            if not is_right:
                path = ".".join(change.key)
                raise Refused(f"{path} is written in a form that cannot be changed by command", "change it in the file")
    return text


def _steps(old: Any, above: Key, change: KeyChange) -> Iterator[KeyChange]:
    """The change as changes of single keys, where a table is there already; nothing where nothing changes."""
    if change.key:
        name, *rest = change.key
        below = old.get(name) if isinstance(old, Mapping) else None
        yield from _steps(below, (*above, name), KeyChange(tuple(rest), change.value))
    elif not isinstance(old, Mapping):
        if old != change.value:
            yield KeyChange(above, change.value)
    elif isinstance(change.value, Mapping):
        yield from (KeyChange((*above, name), None) for name in old if name not in change.value)
        for name, one in change.value.items():
            yield from _steps(old.get(name), (*above, name), KeyChange((), one))
    else:
        yield KeyChange(above, None)
        if change.value is not None:
            yield KeyChange(above, change.value)


def sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without empty sections: a section without anything in it says nothing."""
    return {name: content for name, content in document.items() if content != {}}


def _edited(text: str, change: KeyChange) -> str:
    has_dos_lines = text.count("\r\n") == text.count("\n") > 0
    document = tomlkit.parse(text.replace("\r\n", "\n") if has_dos_lines else text)
    end = _move_comments_to_headers(document)
    if change.value is None:
        _remove(document, change.key)
        if len(change.key) > 2 and not _has(tomllib.loads(tomlkit.dumps(document)), change.key[:-1]):
            # Its last key made the table, which stays, empty.
            _put(document, change.key[:-1], {})
    else:
        _put(document, change.key, change.value)
    text = tomlkit.dumps(document)
    if end and text and not text.endswith("\n"):
        text += "\n"
    text += end
    return text.replace("\n", "\r\n") if has_dos_lines else text


def _has(document: Mapping[str, Any], key: Key) -> bool:
    for name in key:
        if name not in document:
            return False
        document = document[name]
    return True


def _move_comments_to_headers(document: Container) -> str:
    """Give each header the comments above it, which tomlkit counts to the table before; returns those at the end.

    They then stay with their table when the one before gets a key, or goes.
    """
    above: list[tuple[Body, int]] = []

    def take() -> str:
        found = "".join(body[at][1].as_string() for body, at in above)
        for body, at in above:
            body[at] = (None, Null())
        above.clear()
        return found

    def walk(body: Body) -> None:
        for at, (key, item) in enumerate(body):
            if key is None:
                above.append((body, at))
                continue
            for part in item.body if isinstance(item, AoT) else [item]:
                if not isinstance(part, Table):
                    above.clear()
                    continue
                if not part.is_super_table():
                    part.trivia.indent = take() + part.trivia.indent
                walk(part.value.body)

    walk(document.body)
    return take()


def _parts(container: Container, name: str) -> list[tuple[int, Any, Any]]:
    """Where this name is: place, key and item of each; a table may be opened in several places."""
    return [(at, key, item) for at, (key, item) in enumerate(container.body) if key is not None and key.key == name]


def _put(container: Container, key: Key, value: Any, depth: int = 0, is_dotted: bool = False) -> None:
    name, *rest = key
    parts = _parts(container, name)
    below = tuple(rest)
    if not parts:
        _add(container, name, changed({}, KeyChange(below, value)) if below else value, depth, is_dotted)
    elif isinstance(parts[-1][2], Table) and below:
        is_dotted = is_dotted or any(one.is_dotted() for _, one, _ in parts)
        best = max((table for _, _, table in reversed(parts)), key=lambda table: _fit(table, below))
        _put(best.value, below, value, depth + 1, is_dotted)
    else:
        item = parts[-1][2]
        _replace(container, name, item, changed(item.unwrap(), KeyChange(below, value)) if below else value)


def _fit(item: Item, key: Key) -> int:
    """How much of the key leads from here to something that is there; tables with a header before those without."""
    if not isinstance(item, Table):
        return 2
    below = (_fit(one, key[1:]) for _, _, one in _parts(item.value, key[0])) if key else ()
    return 1 + (not item.is_super_table()) + max(below, default=0)


def _add(container: Container, name: str, value: Any, depth: int, is_dotted: bool) -> None:
    if isinstance(value, Mapping) and depth < 2 and not is_dotted:
        table = tomlkit.table(is_super_table=depth == 0 and all(isinstance(one, Mapping) for one in value.values()))
        for each, one in value.items():
            _add(table.value, each, one, depth + 1, False)
        container.append(name, table)
        return
    item = tomlkit.value(written(value))
    beside = [one for key, one in container.body if key is not None and not isinstance(one, (Table, AoT))]
    container.append(name, item)
    if beside:
        item.trivia.indent = beside[-1].trivia.indent


def _replace(container: Container, name: str, item: Item, value: Any) -> None:
    if isinstance(item, Array) and isinstance(value, list) and "\n" in item.as_string():
        # Over several lines: elements come and go, its comments and the rest stay.
        for one in [one for one in item.unwrap() if one not in value]:
            item.remove(one)
        for one in value[len(item) :]:
            item.append(one)
        if item.unwrap() == value:
            return
    text = written(value)
    if isinstance(item, InlineTable) and not item.as_string().startswith("{ ") and isinstance(value, Mapping):
        text = "{" + text[1:-1].strip() + "}"
    container[name] = tomlkit.value(text)


def _remove(container: Container, key: Key) -> None:
    name, *rest = key
    parts = _parts(container, name)
    tables = [table for _, _, table in parts if isinstance(table, Table)]
    if not parts:
        return
    if rest and tables:
        for table in tables:
            _remove(table.value, tuple(rest))
        if not any(tables) and (parts[0][1].is_dotted() or tables[0].is_super_table()):
            container.remove(name)
    elif rest:
        item = parts[0][2]
        _replace(container, name, item, changed(item.unwrap(), KeyChange(tuple(rest), None)))
    else:
        container.remove(name)
        for at, _, table in parts:
            if isinstance(table, Table):
                # The comment right above it goes with it, and the blank line that set it apart.
                above, blank, _ = f"\n{table.trivia.indent}".rpartition("\n\n")
                container.body[at] = (None, Whitespace(f"{above}\n"[1:] if blank else ""))


def written_key(name: str) -> str:
    """A key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else tomlkit.string(name).as_string()


def written(value: Any) -> str:
    """A value on one line, in TOML."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{written_key(key)} = {written(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    text: str = tomlkit.item(value).as_string()
    return text
