"""Which settings there are: the sections and the tables by name, read from the fields of `model.settings`."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Annotated, Any

from gpusched.model.rules import Members, Rule
from gpusched.model.settings import EVERYBODY, AccountSettings, QosSettings, QueueSettings, Settings
from gpusched.model.value import Value, fields

TABLES: Mapping[str, type[QueueSettings] | type[QosSettings] | type[AccountSettings]] = MappingProxyType(
    {"queue": QueueSettings, "qos": QosSettings, "account": AccountSettings}
)
"""Sections that hold a table for each name, as in `[queue.vision]`."""

COUNTS = "license"
"""The section whose keys are names, each with a number."""

PLUGINS = "plugins"


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What is known of one setting without a value: for the reference and for messages."""

    path: str
    """As in the file: `gpu.ids` is `ids` in `[gpu]`; `queue.weight` is `weight` in `[queue.NAME]`."""
    kind: str
    """In words, such as `whole number`."""
    default: Any
    """None when it is unset by default."""
    allowed: str
    """The values it may have, in words; empty when all of its kind."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, and how a value of it is read."""

    info: SettingInfo
    base: object
    """bool, int, float, str, tuple (of texts), NUMBERS (a tuple of them), Mapping (of numbers) or MEMBERS."""
    rule: Rule | None

    def read(self, value: Any) -> Any:
        """The value in its own type; None when it is of another."""
        return _CONVERTERS[self.base](value)


NUMBERS = "numbers"
"""In place of a type: a tuple of whole numbers."""

MEMBERS = "members"
"""In place of a type: users with their shares, also written as a list of names or as `*`."""

_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "list of texts",
    NUMBERS: "list of whole numbers",
    Mapping: "table of names and numbers",
    MEMBERS: 'list of names, table of names and shares, or "*"',
}


def _read(section: str, kind: type[Value]) -> dict[str, Setting]:
    found = {}
    for item in fields(kind):
        if item.required:
            # The name of a table.
            continue
        path = f"{section}.{item.name}"
        hint, rule = item.type, None
        if typing.get_origin(hint) is Annotated:
            hint, rule = typing.get_args(hint)
        base = MEMBERS if isinstance(rule, Members) else _base_of(hint)
        default = {} if base in (Mapping, MEMBERS) else item.default
        found[item.name] = Setting(SettingInfo(path, _KINDS[base], default, str(rule or "")), base, rule)
    return found


def _base_of(hint: Any) -> object:
    """`float` of `float | None`, `tuple` of `tuple[str, ...]`."""
    alternatives = [part for part in typing.get_args(hint) if part is not NoneType]
    if typing.get_origin(hint) not in (tuple, Mapping) and alternatives:
        hint = alternatives[0]
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is int:
        return NUMBERS
    return typing.get_origin(hint) or hint


PLAIN_SECTIONS: Mapping[str, type[Value]] = MappingProxyType(
    {item.name: item.type for item in fields(Settings) if isinstance(item.type, type) and issubclass(item.type, Value)}
)
"""Those that hold settings by name, as in `[gpu]`."""

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {one.info.path: one for section, kind in PLAIN_SECTIONS.items() for one in _read(section, kind).values()}
)
"""Those of the plain sections, by path."""

TABLE_SETTINGS: Mapping[str, Mapping[str, Setting]] = MappingProxyType(
    {section: MappingProxyType(_read(section, kind)) for section, kind in TABLES.items()}
)
"""Those of each named table, by section and key."""

SECTIONS = (*PLAIN_SECTIONS, COUNTS, *TABLES, PLUGINS)


def describe_settings() -> tuple[SettingInfo, ...]:
    """Every setting of the plain sections, in the order of the reference."""
    return tuple(one.info for one in SETTINGS.values())


def describe_tables() -> Mapping[str, tuple[SettingInfo, ...]]:
    """The settings of one queue, one QOS and one account."""
    return {section: tuple(one.info for one in known.values()) for section, known in TABLE_SETTINGS.items()}


def _to_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _to_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Whole numbers may be beyond what a float holds; no setting goes there.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _to_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _to_texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
        return None
    return tuple(value)


def _to_numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)) or any(_to_int(number) is None for number in value):
        return None
    return tuple(value)


def _to_amounts(value: Any) -> dict[str, float] | None:
    if not isinstance(value, Mapping) or any(_to_float(count) is None for count in value.values()):
        return None
    return dict(value)


def _to_members(value: Any) -> dict[str, float] | None:
    if value == EVERYBODY:
        return {EVERYBODY: 1.0}
    if isinstance(value, (list, tuple)):
        return dict.fromkeys(value, 1.0) if all(isinstance(part, str) for part in value) else None
    return _to_amounts(value)


_CONVERTERS: dict[object, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    tuple: _to_texts,
    NUMBERS: _to_numbers,
    Mapping: _to_amounts,
    MEMBERS: _to_members,
}
