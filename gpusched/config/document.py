"""Settings as a document of what differs from the defaults, shaped like a config file; and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpusched.config.schema import COUNTS, SETTINGS, TABLE_SETTINGS, value_of
from gpusched.config.toml_lines import Key
from gpusched.model.settings import Settings
from gpusched.model.value import Value


class KeyChange(Value):
    """One key, and its value from now on; None removes it, with all that is below it."""

    key: Key
    value: Any


class Difference(Value):
    """One key with its value before and after; None where it is not set, `{}` for a table without keys."""

    key: Key
    before: Any
    after: Any


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


def document_of(settings: Settings) -> dict[str, Any]:
    """Sections, tables and keys with other values than the default. What a preset sets is not in it."""
    document: dict[str, Any] = {}
    for path, setting in SETTINGS.items():
        section, _, key = path.partition(".")
        value = value_of(settings, path)
        if section == "priority" and key != "preset" and key not in settings.stated:
            continue
        if value != setting.default or (section == "priority" and key != "preset"):
            document.setdefault(section, {})[key] = _plain(value)
    if settings.license:
        document[COUNTS] = dict(settings.license)
    for section, known in TABLE_SETTINGS.items():
        tables = getattr(settings, section)
        if tables:
            document[section] = {
                name: {
                    key: _plain(value) for key, one in known.items() if (value := getattr(table, key)) != one.default
                }
                for name, table in tables.items()
            }
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        # As most people write it.
        return int(value)
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Every key that differs, by section and name; a table that comes or goes is one difference."""
    found = []
    for section in sorted({*before, *after}):
        old, new = before.get(section, {}), after.get(section, {})
        for name in sorted({*old, *new}):
            one, other = old.get(name), new.get(name)
            if one == other:
                continue
            if section not in TABLE_SETTINGS or one is None or other is None:
                found.append(Difference((section, name), one, other))
            else:
                keys = sorted({*one, *other})
                pairs = [((section, name, key), one.get(key), other.get(key)) for key in keys]
                found += [Difference(*pair) for pair in pairs if pair[1] != pair[2]]
    return found


def with_differences(document: Mapping[str, Any], found: Iterable[Difference]) -> dict[str, Any]:
    """The document after these differences."""
    result = dict(document)
    for one in found:
        result = changed(result, KeyChange(one.key, one.after))
    return {section: content for section, content in result.items() if content}


def look_up(document: Mapping[str, Any], key: Key) -> Any:
    """The value of a key; None when it is not set."""
    value: Any = document
    for name in key:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value
