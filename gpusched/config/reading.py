"""Takes in the config file and single values: what they say, where it was said, and what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gpusched.config.contradictions import contradictions
from gpusched.config.known import COUNTS, PLAIN_SECTIONS, PLUGINS, SECTIONS, SETTINGS, TABLE_SETTINGS, TABLES, Setting
from gpusched.config.lines import Key, lines_of
from gpusched.config.mistakes import (
    CHECK_HINT,
    Place,
    SettingsError,
    no_table,
    unknown_key,
    unknown_section,
    unknown_setting,
    wrong,
)
from gpusched.errors import UsageError
from gpusched.model.presets import preset
from gpusched.model.rules import Text
from gpusched.model.settings import Settings
from gpusched.model.units import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "GPUSCHED_CONFIG"

_NAME = Text(is_word=True)
_MOST_LICENSES = 10**9
_LAST = sys.maxsize
"""In place of a line: after everything that has one."""


class Reader:
    """Gathers values with where they came from, and what is wrong with them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """Of the plain sections, by path."""
        self.origin = dict.fromkeys(SETTINGS, "default")
        self._tables: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in TABLES}
        self._counts: dict[str, int] = {}
        self._plugins: tuple[str, ...] = ()
        self._problems: list[tuple[int, UsageError]] = []
        self._file = ""
        self._lines: dict[Key, int] = {}
        self._wrong: set[Key] = set()
        """What has no value now because the one that was given is wrong: (section, key) or (section, name)."""
        self._is_name_lost = False
        """A section or a table could not be understood, so that what refers to it cannot be judged."""

    def problems(self) -> list[UsageError]:
        """Everything that is wrong, by line; then what is not from a file."""
        return [error for _, error in sorted(self._problems, key=lambda problem: problem[0])]

    def put(self, path: str, value: Any, place: Place) -> None:
        """Take in one value of a plain section."""
        section, _, key = path.partition(".")
        found = self._checked(SETTINGS[path], path, value, place)
        if found is None:
            self._wrong.add((section, key))
        else:
            self.values[path] = found
            self.origin[path] = str(place)

    def read_file(self, file: str, *, must_exist: bool) -> None:
        """Take in a TOML file. Raises: SettingsError when it cannot be read as one."""
        text = _text_of(file, must_exist=must_exist)
        if text is None:
            return
        try:
            document, lines = tomllib.loads(text), lines_of(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SettingsError([UsageError(f"the config file {file} is no TOML: {error}", CHECK_HINT)]) from None
        self._file, self._lines = file, lines
        for section, content in document.items():
            if section not in SECTIONS:
                self._lost(unknown_section(section, self._place(section)), section)
            elif not isinstance(content, dict):
                text = f"{section} is a section; write [{section}] on a line of its own"
                self._lost(UsageError(f"{self._place(section)}: {text}", CHECK_HINT), section)
            elif section in TABLES:
                self._read_tables(section, content)
            elif section == COUNTS:
                self._read_counts(content)
            elif section == PLUGINS:
                self._read_plugins(content)
            else:
                self._read_section(section, content)

    def refuse(self, error: UsageError, place: Place) -> None:
        """Note that this is wrong."""
        self._problems.append((_LAST if place.line is None else place.line, error))

    def _read_section(self, section: str, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            place = self._place(section, key)
            if f"{section}.{key}" in SETTINGS:
                self.put(f"{section}.{key}", value, place)
            else:
                self.refuse(unknown_setting(section, key, place), place)

    def _read_tables(self, section: str, content: Mapping[str, Any]) -> None:
        for name, table in content.items():
            if not isinstance(table, dict):
                self._lost(no_table(section, name, self._place(section, name)), section, name)
            elif not _NAME.admits(name):
                self._lost(self._bad_name(section, name), section, name)
            else:
                self._read_table(section, name, table)

    def _read_table(self, section: str, name: str, table: Mapping[str, Any]) -> None:
        known = TABLE_SETTINGS[section]
        values = self._tables[section][name] = {}
        self.origin[f"{section}.{name}"] = str(self._place(section, name))
        for key, value in table.items():
            path, place = f"{section}.{name}.{key}", self._place(section, name, key)
            found = None
            if key in known:
                found = self._checked(known[key], path, value, place)
            else:
                self.refuse(unknown_key(section, name, key, place), place)
            if found is None:
                self._wrong.add((section, name))
            else:
                values[key] = found
                self.origin[path] = str(place)

    def _read_counts(self, content: Mapping[str, Any]) -> None:
        for name, count in content.items():
            path, place = f"{COUNTS}.{name}", self._place(COUNTS, name)
            if not _NAME.admits(name):
                self.refuse(self._bad_name(COUNTS, name), place)
            elif isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST_LICENSES:
                wanted = f"a whole number, at least 0 and at most {_MOST_LICENSES}"
                self.refuse(wrong(path, count, wanted, place), place)
            else:
                self._counts[name] = count
                self.origin[path] = str(place)

    def _read_plugins(self, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            path, place = f"{PLUGINS}.{key}", self._place(PLUGINS, key)
            if key != "load":
                self.refuse(unknown_setting(PLUGINS, key, place), place)
            elif not isinstance(value, list) or not all(_is_module(one) for one in value):
                self.refuse(wrong(path, value, "a list of names of Python modules", place), place)
            else:
                self._plugins = tuple(value)
                self.origin[path] = str(place)

    def _checked(self, known: Setting, path: str, value: Any, place: Place) -> Any:
        """The value in its own type; None when it was refused."""
        converted = known.read(value)
        if converted is None:
            kind = known.info.kind
            self.refuse(wrong(path, value, kind if known.base is bool else f"a {kind}", place), place)
        elif known.rule is not None and not known.rule.admits(converted):
            self.refuse(wrong(path, value, str(known.rule), place), place)
            converted = None
        return converted

    def _bad_name(self, section: str, name: str) -> UsageError:
        shown = printable(repr(name), 80)
        text = f"{self._place(section, name)}: {shown} is no name of a {section}; it must be {_NAME}"
        return UsageError(text, CHECK_HINT)

    def _lost(self, error: UsageError, *key: str) -> None:
        self._is_name_lost = True
        self.refuse(error, self._place(*key))

    def find_contradictions(self) -> None:
        """Look at all settings together, but for what hangs on a value that is missing because it was refused."""
        if self._is_name_lost:
            return
        is_tier_lost = any(section == "qos" for section, *_ in self._wrong)
        for key, text, hint in contradictions(self.build()):
            if key[:2] in self._wrong or (is_tier_lost and key[0] == "qos" and key[-1] == "preempts"):
                continue
            place = self._place(*self._written(key))
            self.refuse(UsageError(f"{place}: {text}", hint), place)

    def _written(self, key: Key) -> Key:
        """The key, or the first table of those that its default is at odds with: `[queue.vision]`."""
        section, name = key[:2]
        if section != "default" or key in self._lines or name not in self._tables:
            return key
        return (name, next(iter(self._tables[name]), ""))

    def _place(self, *key: str) -> Place:
        """File and line of a key, else of the table that it is in."""
        lines = (self._lines.get(key[:length]) for length in range(len(key), 0, -1))
        return Place(f"file {self._file}" if self._file else "the settings", next(filter(None, lines), None))

    def build(self) -> Settings:
        """All that was gathered, and the defaults for the rest: in [priority] those of the preset."""
        parts: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            section, _, name = path.partition(".")
            parts.setdefault(section, {})[name] = value
        made: dict[str, Any] = {section: kind(**parts.get(section, {})) for section, kind in PLAIN_SECTIONS.items()}
        stated = parts.get("priority", {})
        made["priority"] = preset(made["priority"].preset, stated)
        for section, kind in TABLES.items():
            made[section] = {name: kind(name, **values) for name, values in self._tables[section].items()}
        names = tuple(sorted(stated.keys() - {"preset"}))
        return Settings(**made, license=self._counts, plugins=self._plugins, stated=names)


def _is_module(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _text_of(file: str, *, must_exist: bool) -> str | None:
    try:
        with open(file, "rb") as opened:
            return opened.read().decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        if not must_exist:
            return None
        text, hint = f"there is no config file {file}", f"unset {CONFIG_VARIABLE}, or create it"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        text, hint = f"the config file {file} cannot be read: {reason}", f"see: ls -l {file}"
    except UnicodeDecodeError as error:
        text, hint = f"the config file {file} is no TOML: {error}", CHECK_HINT
    raise SettingsError([UsageError(text, hint)]) from None
