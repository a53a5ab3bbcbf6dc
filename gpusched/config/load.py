"""From a file, the environment and explicit values to settings, or to everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import field

from gpusched.config.known import COUNTS, PLUGINS, SETTINGS, TABLE_SETTINGS
from gpusched.config.mistakes import Place, SettingsError, unknown_setting
from gpusched.config.reading import CONFIG_VARIABLE, Reader
from gpusched.errors import UsageError
from gpusched.model.presets import FAIR, PRESETS, under_preset
from gpusched.model.settings import AUTO, Settings
from gpusched.model.value import Value

FAKE_GPUS_VARIABLE = "GPUSCHED_FAKE_GPUS"


class Loaded(Value):
    """Settings, and for every path where the value came from: `default`, a preset, a file and its line, a variable, an
    option."""

    settings: Settings
    origin: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, path: str) -> str:
        """Where this was written, or the first of what was written beside it (in the same table), or the table itself;
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
    path: str | None,
    environment: Mapping[str, str],
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    chosen: str = FAIR,
) -> Loaded:
    """Settings of one daemon: default, then preset, then file, then environment, then `overrides` by path (`gpu.ids`).

    The file is the one that GPUSCHED_CONFIG names, which must exist, else `path`, which need not.
    Args: chosen: the preset that is in force where the file says `auto`.
    Raises: SettingsError for a file, name or value that cannot be used, or for settings that contradict
    each other; with file, line and the nearest name that can be used.
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
    """Everything that is wrong with the settings, in the order of the file; empty when nothing is."""
    try:
        load_settings(path, environment)
    except SettingsError as error:
        return list(error.problems)
    return []


def _read(path: str | None, environment: Mapping[str, str], overrides: Mapping[str, Any]) -> Reader:
    reader = Reader()
    named = environment.get(CONFIG_VARIABLE)
    file = named or path
    if file is not None:
        reader.read_file(file, must_exist=bool(named))
    fake = environment.get(FAKE_GPUS_VARIABLE)
    if fake:
        place = Place(f"environment {FAKE_GPUS_VARIABLE}")
        reader.put("gpu.fake", fake, place)
        if reader.values.get("gpu.source", "auto") == "auto":
            reader.put("gpu.source", "simulated", place)
    place = Place("override")
    for name, value in overrides.items():
        if name in SETTINGS:
            reader.put(name, value, place)
        else:
            section, _, key = name.partition(".")
            reader.refuse(unknown_setting(section, key, place), place)
    reader.find_contradictions()
    return reader
