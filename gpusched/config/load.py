"""From a file, the environment and explicit values to settings, or to everything that is wrong with them."""

from __future__ import annotations

import difflib
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from gpusched.config.contradictions import contradictions
from gpusched.config.known import COUNTS, PLUGINS, SECTIONS, SETTINGS, TABLE_SETTINGS, TABLES, Setting
from gpusched.config.lines import Key, lines_of
from gpusched.config.rules import Text
from gpusched.errors import UsageError
from gpusched.model.settings import Settings
from gpusched.model.units import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "GPUSCHED_CONFIG"
FAKE_GPUS_VARIABLE = "GPUSCHED_FAKE_GPUS"

_CHECK_HINT = "see docs/reference/settings.md, and check a file with: gpusched config check"
_NAME = Text(is_word=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for every path where the value came from: `default`, a file, a variable, an option."""

    settings: Settings
    origin: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """Every setting as (path, value, origin), in the order of the reference; then the tables, by name."""
        for path in SETTINGS:
            section, _, name = path.partition(".")
            yield path, getattr(getattr(self.settings, section), name), self.origin[path]
        for name, count in sorted(self.settings.license.items()):
            yield f"{COUNTS}.{name}", count, self.origin[f"{COUNTS}.{name}"]
        for section, known in TABLE_SETTINGS.items():
            for name, table in sorted(getattr(self.settings, section).items()):
                for key in known:
                    path = f"{section}.{name}.{key}"
                    yield path, getattr(table, key), self.origin.get(path, "default")
        if self.settings.plugins:
            yield f"{PLUGINS}.load", self.settings.plugins, self.origin[f"{PLUGINS}.load"]


def load_settings(
    path: str | None, environment: Mapping[str, str], overrides: Mapping[str, Any] = MappingProxyType({})
) -> Loaded:
    """Settings of one daemon: default, then file, then environment, then `overrides` by path (`gpu.ids`).

    The file is the one that GPUSCHED_CONFIG names, which must exist, else `path`, which need not.
    Raises: UsageError for a file, name or value that cannot be used, or for settings that contradict each
    other; with file, line and the nearest name that can be used.
    """
    reader = _read(path, environment, overrides)
    if reader.problems:
        first, *more = reader.problems
        if more:
            text = f"{first.message} (and {len(more)} more; see all with: gpusched config check)"
            raise UsageError(text, first.hint)
        raise first
    return reader.loaded()


def problems_in(path: str | None, environment: Mapping[str, str]) -> list[UsageError]:
    """Everything that is wrong with the settings, in the order of the file; empty when nothing is.

    Raises: UsageError for a file that cannot be read at all.
    """
    return _read(path, environment, {}).problems


def _read(path: str | None, environment: Mapping[str, str], overrides: Mapping[str, Any]) -> _Reader:
    reader = _Reader()
    named = environment.get(CONFIG_VARIABLE)
    file = named or path
    if file is not None:
        reader.read_file(file, must_exist=bool(named))
    fake = environment.get(FAKE_GPUS_VARIABLE)
    if fake:
        where = f"environment {FAKE_GPUS_VARIABLE}"
        reader.put("gpu.fake", fake, where)
        if reader.values.get("gpu.source", "auto") == "auto":
            reader.put("gpu.source", "simulated", where)
    for name, value in overrides.items():
        if name not in SETTINGS:
            reader.problems.append(_unknown("setting", name, "override"))
        else:
            reader.put(name, value, "override")
    if not reader.problems:
        # Values that are wrong by themselves would only be told of twice.
        reader.find_contradictions()
    return reader


class _Reader:
    """Gathers values with where they came from, and what is wrong with them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.tables: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in TABLES}
        self.counts: dict[str, int] = {}
        self.plugins: tuple[str, ...] = ()
        self.origin = dict.fromkeys(SETTINGS, "default")
        self.problems: list[UsageError] = []
        self._file = ""
        self._lines: dict[Key, int] = {}

    def put(self, path: str, value: Any, where: str) -> None:
        """Take in one value of a plain section."""
        found = self._checked(SETTINGS[path], path, value, where)
        if found is not None:
            self.values[path] = found
            self.origin[path] = where.partition(", line ")[0]

    def _checked(self, known: Setting, path: str, value: Any, where: str) -> Any:
        converted = known.read(value)
        if converted is None:
            kind = known.info.kind
            self.problems.append(_wrong(path, value, kind if known.base is bool else f"a {kind}", where))
            return None
        if known.rule is not None and not known.rule.admits(converted):
            self.problems.append(_wrong(path, value, str(known.rule), where))
            return None
        return converted

    def read_file(self, file: str, *, must_exist: bool) -> None:
        """Take in a TOML file. Raises: UsageError when it cannot be read as one."""
        text = _text_of(file, must_exist=must_exist)
        if text is None:
            return
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the config file {file} is no TOML: {error}", _CHECK_HINT) from None
        self._file, self._lines = file, lines_of(text)
        for section, content in document.items():
            if section not in SECTIONS:
                self.problems.append(_unknown("section", section, self._where(section)))
            elif not isinstance(content, dict):
                text = f"{section} is a section; write [{section}] on a line of its own"
                self._problem((section,), text)
            elif section in TABLES:
                self._read_tables(section, content)
            elif section == COUNTS:
                self._read_counts(content)
            elif section == PLUGINS:
                self._read_plugins(content)
            else:
                self._read_section(section, content)

    def _read_section(self, section: str, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            path = f"{section}.{key}"
            if path in SETTINGS:
                self.put(path, value, self._where(section, key))
            else:
                self.problems.append(_unknown("setting", path, self._where(section, key)))

    def _read_tables(self, section: str, content: Mapping[str, Any]) -> None:
        known = TABLE_SETTINGS[section]
        for name, table in content.items():
            shown = printable(name, 80)
            if not isinstance(table, dict):
                self._problem(
                    (section, name), f"{section}.{shown} is a table; write [{section}.{shown}] before its keys"
                )
                continue
            if not _NAME.admits(name):
                self._problem((section, name), f"{name!r} is no name of a {section}; it must be {_NAME}")
                continue
            values = self.tables[section][name] = {}
            for key, value in table.items():
                path, where = f"{section}.{shown}.{key}", self._where(section, name, key)
                if key not in known:
                    near = difflib.get_close_matches(key, known, n=1)
                    hint = f"did you mean {near[0]}?" if near else f"[{section}.NAME] knows: {', '.join(known)}"
                    self.problems.append(UsageError(f"{where}: there is no setting {printable(path, 120)}", hint))
                    continue
                found = self._checked(known[key], path, value, where)
                if found is not None:
                    values[key] = found
                    self.origin[path] = f"file {self._file}"

    def _read_counts(self, content: Mapping[str, Any]) -> None:
        for name, count in content.items():
            if not _NAME.admits(name):
                self._problem((COUNTS, name), f"{name!r} is no name of a license; it must be {_NAME}")
            elif isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10**9:
                where = self._where(COUNTS, name)
                self.problems.append(_wrong(f"{COUNTS}.{name}", count, "a whole number, 0 or more", where))
            else:
                self.counts[name] = count
                self.origin[f"{COUNTS}.{name}"] = f"file {self._file}"

    def _read_plugins(self, content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            where = self._where(PLUGINS, key)
            if key != "load":
                self.problems.append(_unknown("setting", f"{PLUGINS}.{key}", where))
            elif not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
                self.problems.append(_wrong(f"{PLUGINS}.load", value, "a list of names of Python modules", where))
            else:
                self.plugins = tuple(value)
                self.origin[f"{PLUGINS}.load"] = f"file {self._file}"

    def find_contradictions(self) -> None:
        """Look at all settings together."""
        for path, text, hint in contradictions(self._build()):
            self.problems.append(UsageError(f"{self._where(*path)}: {text}", hint))

    def _problem(self, key: Key, text: str) -> None:
        self.problems.append(UsageError(f"{self._where(*key)}: {text}", _CHECK_HINT))

    def _where(self, *key: str) -> str:
        """File and line of a key, or of the table that it would be in; the origin of what no file says."""
        for length in range(len(key), 0, -1):
            line = self._lines.get(key[:length])
            if line is not None:
                return f"file {self._file}, line {line}"
        return f"file {self._file}" if self._file else "the settings"

    def loaded(self) -> Loaded:
        """What was gathered."""
        return Loaded(self._build(), MappingProxyType(self.origin))

    def _build(self) -> Settings:
        kinds = typing.get_type_hints(Settings)
        parts: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            section, _, name = path.partition(".")
            parts.setdefault(section, {})[name] = value
        made: dict[str, Any] = {
            one.name: kinds[one.name](**parts.get(one.name, {}))
            for one in fields(Settings)
            if is_dataclass(kinds[one.name])
        }
        for section, kind in TABLES.items():
            made[section] = {name: kind(name, **values) for name, values in self.tables[section].items()}
        return Settings(**made, license=self.counts, plugins=self.plugins)


def _text_of(file: str, *, must_exist: bool) -> str | None:
    try:
        with open(file, "rb") as opened:
            return opened.read().decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        if must_exist:
            raise UsageError(f"there is no config file {file}", f"unset {CONFIG_VARIABLE}, or create it") from None
        return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"the config file {file} cannot be read: {reason}", f"see: ls -l {file}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"the config file {file} is no TOML: {error}", _CHECK_HINT) from None


def _wrong(path: str, value: Any, wanted: str, where: str) -> UsageError:
    shown = printable(str(value).lower() if isinstance(value, bool) else repr(value), 80)
    return UsageError(f"{where}: {printable(path, 120)} is {shown}; it must be {wanted}", _CHECK_HINT)


def _unknown(what: str, name: str, where: str) -> UsageError:
    section, _, key = name.rpartition(".")
    near = _nearest(section, key)
    if near:
        hint = f"did you mean {near}?"
    elif section in SECTIONS:
        siblings = [path.partition(".")[2] for path in SETTINGS if path.startswith(section + ".")] or ["load"]
        hint = f"[{section}] knows: {', '.join(siblings)}"
    else:
        hint = f"sections: {', '.join(SECTIONS)}"
    return UsageError(f"{where}: there is no {what} {printable(name, 80)}", hint)


def _nearest(section: str, key: str) -> str | None:
    """The section or setting that was probably meant: one nearby first, then one of that name elsewhere."""
    here = {path.partition(".")[2]: path for path in SETTINGS if path.startswith(section + ".")}
    anywhere = {path.partition(".")[2]: path for path in reversed(list(SETTINGS))}
    for candidates in (here or dict.fromkeys(SECTIONS), anywhere):
        for word in difflib.get_close_matches(key, candidates, n=1):
            return candidates[word] or word
    return None
