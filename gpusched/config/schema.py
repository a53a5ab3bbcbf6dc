"""The sections and settings of a config file, derived from the fields of `model.settings` and of add-ons' sections."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Annotated, Any

import msgspec

from gpusched import entry_points
from gpusched.model.queue_settings import EVERYBODY, AccountSettings, QosSettings, QueueSettings, UserSettings
from gpusched.model.rules import AT_START, MemberShares, Rule
from gpusched.model.settings import Settings
from gpusched.model.value import Value, fields, replace

TABLES: Mapping[str, type[QueueSettings] | type[QosSettings] | type[UserSettings] | type[AccountSettings]] = (
    MappingProxyType({"queue": QueueSettings, "qos": QosSettings, "user": UserSettings, "account": AccountSettings})
)
"""Sections that hold a table for each name, as in `[queue.vision]`."""

COUNTS = "license"
"""The section that maps names to numbers."""

PLUGINS = "plugins"
"""The section whose one key, `load`, is a field of `Settings` itself."""

_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its type, default and rule, for reading values, messages and the reference."""

    path: str
    """As in the file: `gpu.ids` is `ids` in `[gpu]`; `queue.weight` is `weight` in `[queue.NAME]`."""
    type: Any
    """The value's type, without None for an unset setting."""
    default: Any
    rule: Rule | None
    needs_restart: bool
    """A reload does not apply it."""

    @property
    def key(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def allowed(self) -> str:
        kind = _KINDS.get(self.type, "")
        if self.rule is None:
            return kind
        return f"{kind} {self.rule}" if self.type in (int, float) else str(self.rule)

    def read(self, value: Any) -> Any:
        """Convert the value to the setting's type. Raises: ValueError when it is invalid."""
        if isinstance(self.rule, MemberShares):
            value = _shares_of(value)
        found = msgspec.convert(value, self.type)
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError
        if self.rule is not None and not self.rule.admits(found):
            raise ValueError
        return found


def _shares_of(members: Any) -> Any:
    """Expand a list of names or `*` to a table of names and shares."""
    if members == EVERYBODY:
        return {EVERYBODY: 1.0}
    return dict.fromkeys(members, 1.0) if isinstance(members, (list, tuple)) else members


def _setting(section: str, item: Any, key: str = "") -> Setting:
    hint, *notes = typing.get_args(item.type) if typing.get_origin(item.type) is Annotated else (item.type,)
    rules = [note for note in notes if note is not AT_START]
    # `float` of `float | None`.
    options = [part for part in typing.get_args(hint) if part is not NoneType]
    if NoneType in typing.get_args(hint):
        (hint,) = options
    default = item.default_factory() if item.default is msgspec.NODEFAULT else item.default
    return Setting(f"{section}.{key or item.name}", hint, default, rules[0] if rules else None, AT_START in notes)


def _settings(section: str, kind: type[Value]) -> dict[str, Setting]:
    # A field without a default is the name of a table.
    return {item.name: _setting(section, item) for item in fields(kind) if not item.required}


OF_ADD_ONS: Mapping[str, type[Value]] = MappingProxyType(entry_points.all_of("settings"))
"""Sections that add-ons declare."""

ADD_ON_OF: Mapping[str, str] = MappingProxyType({"handover": "slurm", "web": "web"})
"""Section -> the add-on that declares it, to be named where it is absent."""

PLAIN_SECTIONS: Mapping[str, type[Value]] = MappingProxyType(
    {item.name: item.type for item in fields(Settings) if isinstance(item.type, type) and issubclass(item.type, Value)}
    | dict(OF_ADD_ONS)
)
"""Sections that hold settings by name, as in `[gpu]`."""

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {one.path: one for section, kind in PLAIN_SECTIONS.items() for one in _settings(section, kind).values()}
    | {f"{PLUGINS}.load": _setting(PLUGINS, item, "load") for item in fields(Settings) if item.name == PLUGINS}
)
"""Settings of the plain sections and of [plugins], by path, in the order of the reference."""

TABLE_SETTINGS: Mapping[str, Mapping[str, Setting]] = MappingProxyType(
    {section: MappingProxyType(_settings(section, kind)) for section, kind in TABLES.items()}
)
"""Settings of each named table, by section and key."""

SECTIONS = (*PLAIN_SECTIONS, COUNTS, *TABLES, PLUGINS)


def value_of(settings: Settings, path: str) -> Any:
    """The value of one of SETTINGS; None for one of an add-on that is absent."""
    section, _, key = path.partition(".")
    return settings.plugins if section == PLUGINS else getattr(_section_of(settings, section), key, None)


def with_value(settings: Settings, path: str, value: Any) -> Settings:
    """Copy the settings with another value for one of SETTINGS."""
    section, _, key = path.partition(".")
    if section == PLUGINS:
        return replace(settings, plugins=value)
    changed = replace(_section_of(settings, section), **{key: value})
    if section in OF_ADD_ONS:
        return replace(settings, of_add_ons={**settings.of_add_ons, section: changed})
    return replace(settings, **{section: changed})


def _section_of(settings: Settings, section: str) -> Any:
    if section not in ADD_ON_OF:
        return getattr(settings, section)
    kind = OF_ADD_ONS.get(section)
    return settings.of_add_ons.get(section) or (None if kind is None else kind())
