"""Reads settings from a file, the environment and explicit values, or reports every error in them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec import field

from gpusched.config.contradictions import contradictions
from gpusched.config.schema import (
    ADD_ON_OF,
    COUNTS,
    OF_ADD_ONS,
    PLAIN_SECTIONS,
    PLUGINS,
    SECTIONS,
    SETTINGS,
    TABLE_SETTINGS,
    TABLES,
    Setting,
    value_of,
)
from gpusched.config.toml_lines import Key, lines_of
from gpusched.entry_points import absent
from gpusched.errors import Refused, UsageError
from gpusched.model.planner_settings import AUTO
from gpusched.model.presets import FAIR, PRESETS, preset, under_preset
from gpusched.model.rules import WORD, Range
from gpusched.model.settings import Settings
from gpusched.model.units import closest, printable
from gpusched.model.value import Value
from gpusched.paths import MAX_TEXT, read_at_most

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "GPUSCHED_CONFIG"
FAKE_GPUS_VARIABLE = "GPUSCHED_FAKE_GPUS"
CHECK_HINT = "see docs/reference/settings.md, and check a file with: gpusched config check"

_COUNT = Setting(COUNTS, int, 0, Range(0, 10**9), needs_restart=False)
"""Type of each value of [license]."""
_LAST = sys.maxsize
"""In place of a line: sorts last."""


class SettingsError(UsageError):
    """Settings are unusable; `problems` has a sentence for each reason, in the order of the file."""

    def __init__(self, problems: Iterable[UsageError]) -> None:
        self.problems = tuple(problems)
        first, *more = self.problems
        text = f" (and {len(more)} more; see all with: gpusched config check)" if more else ""
        super().__init__(first.message + text, first.hint)


class Loaded(Value):
    """Settings, and the origin of each by path: `default`, a preset, a file and its line, a variable, an option."""

    settings: Settings
    origin: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, path: str) -> str:
        """Where this was written, or the first entry beside it (in the same table), or the table itself;
        else `default`."""
        table = path.rpartition(".")[0]
        beside = f"{table}."
        written = [self.origin.get(path, "default")]
        written += [origin for known, origin in self.origin.items() if known.startswith(beside)]
        written.append(self.origin.get(table, "default"))
        return next((origin for origin in written if origin != "default"), "default")

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """Every setting as (path, value, origin), in the order of the reference; then the tables, by name."""
        for path in SETTINGS:
            yield path, value_of(self.settings, path), self.origin[path]
        for name, count in sorted(self.settings.license.items()):
            yield f"{COUNTS}.{name}", count, self.origin[f"{COUNTS}.{name}"]
        for section, known in TABLE_SETTINGS.items():
            for name, table in sorted(getattr(self.settings, section).items()):
                for key in known:
                    path = f"{section}.{name}.{key}"
                    yield path, getattr(table, key), self.origin.get(path, "default")


def load_settings(
    path: str | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    chosen: str = FAIR,
) -> Loaded:
    """Load one daemon's settings: default, preset, file, environment, then `overrides` by path (`gpu.ids`).

    The file is named by GPUSCHED_CONFIG, which must exist, or else `path`, which need not.
    Args: chosen: the preset in force where the file says `auto`.
    Raises: SettingsError for an invalid file, name or value, or for settings that contradict each other; with file,
    line and the nearest valid name.
    """
    reader = _read(path, environment, overrides)
    problems = reader.problems()
    if problems:
        raise SettingsError(problems)
    settings, origin = reader.build(), reader.origin
    named = settings.priority.preset
    in_force = chosen if named == AUTO else named
    if named == AUTO:
        settings = under_preset(settings, in_force)
    from_preset = f"preset {in_force}" + (f", chosen by {AUTO}" if named == AUTO else "")
    for key in PRESETS[in_force]:
        if key not in settings.stated:
            origin[f"priority.{key}"] = from_preset
    return Loaded(settings, MappingProxyType(origin))


def problems_in(path: str | None, environment: Mapping[str, str]) -> list[UsageError]:
    """Every error in the settings, in the order of the file; empty when there is none."""
    try:
        load_settings(path, environment)
    except SettingsError as error:
        return list(error.problems)
    return []


def parse_text(text: str) -> dict[str, Any]:
    """A config file's text as `tomllib` reads it. Raises: ValueError."""
    document: dict[str, Any] = tomllib.loads(text)
    return document


def settings_in(text: str, file: str) -> Settings:
    """Settings of a text that is about to be a config file. Raises: SettingsError with the lines of this text."""
    reader = _Reader()
    reader.read_text(text.replace("\r\n", "\n"), file)
    reader.find_contradictions()
    if problems := reader.problems():
        raise SettingsError(problems)
    return reader.build()


def _read(path: str | None, environment: Mapping[str, str], overrides: Mapping[str, Any]) -> _Reader:
    reader = _Reader()
    named = environment.get(CONFIG_VARIABLE)
    file = named or path
    if file is not None:
        reader.read_file(file, must_exist=bool(named))
    fake = environment.get(FAKE_GPUS_VARIABLE)
    if fake:
        place = _Place(f"environment {FAKE_GPUS_VARIABLE}")
        reader.put("gpu.fake", fake, place)
        if reader.values.get("gpu.source", "auto") == "auto":
            reader.put("gpu.source", "simulated", place)
    for name, value in overrides.items():
        reader.put(name, value, _Place("override"))
    reader.find_contradictions()
    return reader


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value was written; in text form in `Loaded.origin`."""

    origin: str
    """`file /etc/gpusched/config.toml`, `override`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}, line {self.line}"


class _Reader:
    """Collects values with their origins, and errors in them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """Of SETTINGS, by path."""
        self.origin = dict.fromkeys(SETTINGS, "default")
        self._tables: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in TABLES}
        self._counts: dict[str, int] = {}
        self._problems: list[tuple[int, UsageError]] = []
        self._file = ""
        self._lines: dict[Key, int] = {}
        self._wrong: set[Key] = set()
        """Keys with a wrong value: (section, key) or (section, name)."""
        self._is_name_lost = False
        """A section or table could not be read, so references to it cannot be checked."""

    def problems(self) -> list[UsageError]:
        """Every error, by line; then those outside the file."""
        return [error for _, error in sorted(self._problems, key=lambda problem: problem[0])]

    def read_file(self, file: str, *, must_exist: bool) -> None:
        """Read a TOML file. Raises: SettingsError when it cannot be parsed."""
        text = _text_of(file, must_exist=must_exist)
        if text is not None:
            self.read_text(text, file)

    def read_text(self, text: str, file: str) -> None:
        """Read the text of a file. Raises: SettingsError when it cannot be parsed."""
        try:
            document, lines = tomllib.loads(text), lines_of(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SettingsError(
                [UsageError(f"the config file {file} is not valid TOML: {error}", CHECK_HINT)]
            ) from None
        self._file, self._lines = file, lines
        for section, content in document.items():
            if section not in SECTIONS and section in ADD_ON_OF:
                why = absent(ADD_ON_OF[section], f"[{section}]")
                self._refuse(why.message, section, hint=why.hint)
            elif section not in SECTIONS:
                near = closest(section, SECTIONS) or _path_of(section)
                self._refuse(
                    f"unknown section {printable(section, 80)}", section, hint=_meant(near, "sections", SECTIONS)
                )
                self._is_name_lost = True
            elif not isinstance(content, dict):
                self._refuse(f"{section} is a section; write [{section}] on a separate line", section)
                self._is_name_lost = True
            elif section in TABLES:
                self._read_tables(section, content)
            elif section == COUNTS:
                self._read_counts(content)
            else:
                for key, value in content.items():
                    self.put(f"{section}.{key}", value, self._place(section, key))

    def put(self, path: str, value: Any, place: _Place) -> None:
        """Read one value of SETTINGS."""
        section, _, key = path.partition(".")
        if path not in SETTINGS:
            siblings = {known.key: known.path for known in SETTINGS.values() if known.path.startswith(f"{section}.")}
            near = siblings.get(closest(key, siblings) or "") or _path_of(key)
            self._note(f"unknown setting {printable(path, 80)}", place, _meant(near, f"[{section}] has", siblings))
        elif self._take(SETTINGS[path], path, value, place, self.values, path):
            self.origin[path] = str(place)
        else:
            self._wrong.add((section, key))

    def _read_tables(self, section: str, content: Mapping[str, Any]) -> None:
        for name, table in content.items():
            if not isinstance(table, dict):
                shown = printable(name, 80)
                text = f"{section}.{shown} is a table; write [{section}.{shown}] before its keys"
                if name in TABLE_SETTINGS[section]:
                    text = f"{shown} is a setting of one {section}; write it below [{section}.NAME]"
                self._refuse(text, section, name)
                self._is_name_lost = True
            elif not self._is_name(section, name):
                self._is_name_lost = True
            else:
                self._read_table(section, name, table)

    def _read_table(self, section: str, name: str, table: Mapping[str, Any]) -> None:
        known = TABLE_SETTINGS[section]
        values = self._tables[section][name] = {}
        self.origin[f"{section}.{name}"] = str(self._place(section, name))
        for key, value in table.items():
            path, place = f"{section}.{name}.{key}", self._place(section, name, key)
            if key not in known:
                hint = _meant(closest(key, known), f"[{section}.NAME] has", known)
                self._note(f"unknown setting {printable(path, 120)}", place, hint)
            elif self._take(known[key], path, value, place, values, key):
                self.origin[path] = str(place)
                continue
            self._wrong.add((section, name))

    def _read_counts(self, content: Mapping[str, Any]) -> None:
        for name, count in content.items():
            path, place = f"{COUNTS}.{name}", self._place(COUNTS, name)
            if self._is_name(COUNTS, name) and self._take(_COUNT, path, count, place, self._counts, name):
                self.origin[path] = str(place)

    def _take(self, known: Setting, path: str, value: Any, place: _Place, values: dict[str, Any], key: str) -> bool:
        """Store the value among the others, or refuse it."""
        try:
            values[key] = known.read(value)
        except ValueError:
            shown = printable(str(value).lower() if isinstance(value, bool) else repr(value), 80)
            self._note(f"{printable(path, 120)} is {shown}; it must be {known.allowed}", place)
            return False
        return True

    def _is_name(self, section: str, name: str) -> bool:
        if not WORD.admits(name):
            self._refuse(
                f"{printable(repr(name), 80)} cannot be the name of a {section}; it must be {WORD}", section, name
            )
            return False
        return True

    def _refuse(self, text: str, *key: str, hint: str = CHECK_HINT) -> None:
        self._note(text, self._place(*key), hint)

    def _note(self, text: str, place: _Place, hint: str = CHECK_HINT) -> None:
        self._problems.append((_LAST if place.line is None else place.line, UsageError(f"{place}: {text}", hint)))

    def find_contradictions(self) -> None:
        """Check all settings together, except what depends on a refused value."""
        if self._is_name_lost:
            return
        is_tier_lost = any(section == "qos" for section, *_ in self._wrong)
        for key, text, hint in contradictions(self.build()):
            if key[:2] in self._wrong or (is_tier_lost and key[0] == "qos" and key[-1] == "preempts"):
                continue
            self._refuse(text, *self._written(key), hint=hint)

    def _written(self, key: Key) -> Key:
        """The key, or the first table that its default contradicts: `[queue.vision]`."""
        section, name = key[:2]
        if section != "default" or key in self._lines or name not in self._tables:
            return key
        return (name, next(iter(self._tables[name]), ""))

    def _place(self, *key: str) -> _Place:
        """File and line of a key, else of its table."""
        lines = (self._lines.get(key[:length]) for length in range(len(key), 0, -1))
        return _Place(f"file {self._file}" if self._file else "the settings", next(filter(None, lines), None))

    def build(self) -> Settings:
        """All values read, with defaults for the rest: in [priority] those of the preset."""
        parts: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            section, _, name = path.partition(".")
            parts.setdefault(section, {})[name] = value
        plain = {section: kind(**parts.get(section, {})) for section, kind in PLAIN_SECTIONS.items()}
        made: dict[str, Any] = {section: found for section, found in plain.items() if section not in OF_ADD_ONS}
        made["of_add_ons"] = {
            section: plain[section] for section, kind in OF_ADD_ONS.items() if plain[section] != kind()
        }
        stated = parts.get("priority", {})
        made["priority"] = preset(made["priority"].preset, stated)
        for section, kind in TABLES.items():
            made[section] = {name: kind(name, **values) for name, values in self._tables[section].items()}
        names = tuple(sorted(stated.keys() - {"preset"}))
        return Settings(**made, license=self._counts, plugins=parts.get(PLUGINS, {}).get("load", ()), stated=names)


def _path_of(key: str) -> str | None:
    """Path of the first setting in any section with a name similar to this one."""
    anywhere = {known.key: path for path, known in reversed(list(SETTINGS.items()))}
    return anywhere.get(closest(key, anywhere) or "")


def _meant(near: str | None, title: str, otherwise: Iterable[str]) -> str:
    return f"did you mean {near}?" if near else f"{title}: {', '.join(otherwise)}"


def _text_of(file: str, *, must_exist: bool) -> str | None:
    try:
        with open(file, "rb") as opened:
            content = read_at_most(opened, MAX_TEXT, f"the config file {file}", f"see: ls -l {file}")
        return content.decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        if not must_exist:
            return None
        text, hint = f"there is no config file {file}", f"unset {CONFIG_VARIABLE}, or create it"
    except Refused as error:
        text, hint = error.message, error.hint
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        text, hint = f"the config file {file} cannot be read: {reason}", f"see: ls -l {file}"
    except UnicodeDecodeError as error:
        text, hint = f"the config file {file} is not valid TOML: {error}", CHECK_HINT
    raise SettingsError([UsageError(text, hint)]) from None
