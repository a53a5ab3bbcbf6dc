"""Settings from defaults, the TOML file, the environment and explicit values, the later ones winning.

`model.settings` says which settings there are; here is what values they may have and where each came from.
"""

from __future__ import annotations

import difflib
import math
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType, NoneType
from typing import Any

from gpusched.errors import UsageError
from gpusched.model.settings import ORDERS, STRATEGIES, Settings
from gpusched.model.units import MAX_MIB, MAX_SECONDS, printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "GPUSCHED_CONFIG"
FAKE_GPUS_VARIABLE = "GPUSCHED_FAKE_GPUS"

_CHECK_HINT = "see docs/reference/settings.md, and check a file with: gpusched config check"


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What is known of one setting without a value: for the reference and for messages."""

    path: str
    """As in the file: `gpu.ids` is `ids` in `[gpu]`."""
    kind: str
    """In words, such as `whole number`."""
    default: Any
    """None when it is unset by default."""
    doc: str
    """Meaning and unit."""
    allowed: str
    """The values it may have, in words; empty when all of its kind."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for every path where the value came from: `default`, a file, a variable, an option."""

    settings: Settings
    origin: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """Every setting as (path, value, origin), in the order of the reference."""
        for path in _SETTINGS:
            section, _, name = path.partition(".")
            yield path, getattr(getattr(self.settings, section), name), self.origin[path]


# --- what values are allowed --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    above: bool = False
    """The low end itself is not allowed."""

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"{least} and at most {self.high:.15g}"

    def admits(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high


@dataclass(frozen=True, slots=True)
class _OneOf:
    words: tuple[str, ...]

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    def admits(self, value: str) -> bool:
        return value in self.words


@dataclass(frozen=True, slots=True)
class _Text:
    is_word: bool = False

    def __str__(self) -> str:
        return "one word without blanks" if self.is_word else "not empty, on one line"

    def admits(self, value: str) -> bool:
        if self.is_word:
            return bool(value) and value.isprintable() and " " not in value
        return bool(value) and not any(char in value for char in "\0\r\n")


@dataclass(frozen=True, slots=True)
class _Patterns:
    def __str__(self) -> str:
        return "name patterns, none of them empty"

    def admits(self, value: tuple[str, ...]) -> bool:
        return all(value)


_Rule = _Range | _OneOf | _Text | _Patterns

_WEIGHT = _Range(0, 1e12)
_FRACTION = _Range(0, 1, above=True)
_RATE = _Range(0, MAX_MIB, above=True)
_MIB = _Range(0, MAX_MIB)
_SOME_MIB = _Range(1, MAX_MIB)
_WAIT = _Range(0, MAX_SECONDS)
_SOME_TIME = _Range(0, MAX_SECONDS, above=True)
_PACE = _Range(0.001, 3600)
_CORES = _Range(0, 1 << 20, above=True)
_COUNT = _Range(1, 10**9)
_FACTOR = _Range(1, 100)

_RULES: dict[str, _Rule] = {
    "priority.weight_age": _WEIGHT,
    "priority.max_age_s": _SOME_TIME,
    "priority.weight_nice": _WEIGHT,
    "ceiling.cpu_fraction": _FRACTION,
    "ceiling.mem_fraction": _FRACTION,
    "ceiling.disk_mib_s": _RATE,
    "ceiling.net_mib_s": _RATE,
    "ceiling.gpu_fraction": _FRACTION,
    "node.name": _Text(is_word=True),
    "node.cpus": _CORES,
    "node.mem_mib": _SOME_MIB,
    "gpu.source": _OneOf(("auto", "nvml", "simulated", "none")),
    "gpu.fake": _Text(),
    "gpu.ids": _OneOf(("index", "uuid")),
    "gpu.deadline_s": _Range(0, 3600, above=True),
    "gpu.free_polls": _Range(1, 1000),
    "gpu.foreign_mib": _MIB,
    "gpu.foreign_peak_s": _WAIT,
    "gpu.share_headroom_mib": _MIB,
    "gpu.release_wait_s": _WAIT,
    "gpu.baseline_mib": _MIB,
    # Sizes that the API holds in memory while it reads them.
    "limit.script_mib": _Range(0, 1024, above=True),
    "limit.environment_mib": _Range(0, 1024, above=True),
    "limit.jobs": _COUNT,
    "limit.batch": _COUNT,
    "default.cpus": _Range(0, 1 << 20),
    "default.time_limit_s": _Range(1, MAX_SECONDS),
    "default.queue": _Text(is_word=True),
    "default.output": _Text(),
    "life.grace_s": _WAIT,
    "life.leftover_grace_s": _WAIT,
    "life.max_requeues": _Range(0, 10**6),
    "daemon.poll_s": _PACE,
    "daemon.idle_poll_s": _PACE,
    "daemon.log_level": _OneOf(("debug", "info", "warning", "error")),
    # Without a size and one old file, the log would never be rotated and grow without end.
    "daemon.log_mib": _Range(0.01, MAX_MIB),
    "daemon.log_files": _Range(1, 1000),
    "daemon.drop_env": _Patterns(),
    "priority.order": _OneOf(ORDERS),
    "priority.weight_fairshare": _WEIGHT,
    "priority.weight_size": _WEIGHT,
    "priority.weight_queue": _WEIGHT,
    "priority.weight_qos": _WEIGHT,
    "priority.weight_deadline": _WEIGHT,
    "priority.weight_fit": _WEIGHT,
    "priority.half_life_s": _SOME_TIME,
    "priority.backfill_depth": _Range(1, 10_000),
    "placement.strategy": _OneOf(STRATEGIES),
    "oversubscribe.cpus": _FACTOR,
    "oversubscribe.mem": _FACTOR,
    "oversubscribe.vram": _FACTOR,
    "preempt.mode": _OneOf(("off", "requeue", "suspend")),
    "preempt.min_run_s": _WAIT,
    "node.labels": _Patterns(),
}


# --- what settings there are --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    info: SettingInfo
    base: type
    """bool, int, float, str or tuple (of texts)."""
    rule: _Rule | None


_KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    tuple: "list of texts",
    Mapping: "table of whole numbers",
}


def _read_settings() -> dict[str, _Setting]:
    found = {}
    sections = typing.get_type_hints(Settings)
    for section in fields(Settings):
        if not is_dataclass(sections[section.name]):
            continue
        hints = typing.get_type_hints(sections[section.name])
        for item in fields(sections[section.name]):
            path = f"{section.name}.{item.name}"
            base = _base_of(hints[item.name])
            rule = _RULES.get(path)
            default = {} if base is Mapping else item.default
            info = SettingInfo(path, _KINDS[base], default, item.metadata["doc"], str(rule or ""))
            found[path] = _Setting(info, base, rule)
    return found


def _base_of(hint: Any) -> type:
    """`float` of `float | None`, `tuple` of `tuple[str, ...]`."""
    alternatives = [part for part in typing.get_args(hint) if part is not NoneType]
    if typing.get_origin(hint) not in (tuple, Mapping) and alternatives:
        hint = alternatives[0]
    base: type = typing.get_origin(hint) or hint
    return base


_SETTINGS: Mapping[str, _Setting] = MappingProxyType(_read_settings())
_SECTIONS = tuple(dict.fromkeys(path.partition(".")[0] for path in _SETTINGS))


def describe_settings() -> tuple[SettingInfo, ...]:
    """Every setting, section by section, in the order of the reference."""
    return tuple(one.info for one in _SETTINGS.values())


# --- loading ------------------------------------------------------------------------------------


def load_settings(
    path: str | None, environment: Mapping[str, str], overrides: Mapping[str, Any] = MappingProxyType({})
) -> Loaded:
    """Settings of one daemon: default, then file, then environment, then `overrides` by path (`gpu.ids`).

    The file is the one that GPUSCHED_CONFIG names, which must exist, else `path`, which need not.
    Raises: UsageError for a file, name or value that cannot be used, with the nearest name that can.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(_SETTINGS, "default")

    def put(name: str, value: Any, where: str) -> None:
        values[name] = _checked(name, value, where)
        origin[name] = where

    named = environment.get(CONFIG_VARIABLE)
    file = named or path
    if file is not None:
        where = f"file {file}"
        for name, value in _read_file(file, must_exist=bool(named)):
            put(name, value, where)
    fake = environment.get(FAKE_GPUS_VARIABLE)
    if fake:
        where = f"environment {FAKE_GPUS_VARIABLE}"
        put("gpu.fake", fake, where)
        if values.get("gpu.source", "auto") == "auto":
            put("gpu.source", "simulated", where)
    for name, value in overrides.items():
        if name not in _SETTINGS:
            raise _unknown("setting", name, "override")
        put(name, value, "override")
    return Loaded(_build(values), MappingProxyType(origin))


def _build(values: Mapping[str, Any]) -> Settings:
    sections = typing.get_type_hints(Settings)
    parts: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for path, value in values.items():
        section, _, name = path.partition(".")
        parts[section][name] = value
    return Settings(**{name: sections[name](**given) for name, given in parts.items()})


def _read_file(file: str, *, must_exist: bool) -> Iterator[tuple[str, Any]]:
    """Every (path, value) of a TOML file, of known names only."""
    try:
        with open(file, "rb") as opened:
            document = tomllib.load(opened)
    except FileNotFoundError:
        if must_exist:
            raise UsageError(f"there is no config file {file}", f"unset {CONFIG_VARIABLE}, or create it") from None
        return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"the config file {file} cannot be read: {reason}", f"see: ls -l {file}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the config file {file} is no TOML: {error}", _CHECK_HINT) from None
    where = f"file {file}"
    for section, table in document.items():
        if section not in _SECTIONS:
            raise _unknown("section", section, where)
        if not isinstance(table, dict):
            raise UsageError(f"{where}: {section} is a section; write [{section}] on a line of its own", _CHECK_HINT)
        for key, value in table.items():
            path = f"{section}.{key}"
            if path not in _SETTINGS:
                raise _unknown("setting", path, where)
            yield path, value


def _checked(path: str, value: Any, where: str) -> Any:
    """The value in its own type. Raises: UsageError when its type or size is wrong."""
    setting = _SETTINGS[path]
    converted = _CONVERTERS[setting.base](value)
    if converted is None:
        raise _wrong(path, value, f"a {setting.info.kind}" if setting.base is not bool else "true or false", where)
    if setting.rule is not None and not setting.rule.admits(converted):
        raise _wrong(path, value, str(setting.rule), where)
    return converted


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


def _to_counts(value: Any) -> dict[str, int] | None:
    if not isinstance(value, dict) or not all(_to_int(count) is not None and count >= 0 for count in value.values()):
        return None
    return dict(value)


def _to_texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
        return None
    return tuple(value)


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    tuple: _to_texts,
    Mapping: _to_counts,
}


def _wrong(path: str, value: Any, wanted: str, where: str) -> UsageError:
    shown = printable(str(value).lower() if isinstance(value, bool) else repr(value), 80)
    return UsageError(f"{where}: {path} is {shown}; it must be {wanted}", _CHECK_HINT)


def _unknown(what: str, name: str, where: str) -> UsageError:
    section, _, key = name.rpartition(".")
    near = _nearest(section, key)
    if near:
        hint = f"did you mean {near}?"
    elif section in _SECTIONS:
        siblings = [path.partition(".")[2] for path in _SETTINGS if path.startswith(section + ".")]
        hint = f"[{section}] knows: {', '.join(siblings)}"
    else:
        hint = f"sections: {', '.join(_SECTIONS)}"
    return UsageError(f"{where}: there is no {what} {printable(name, 80)}", hint)


def _nearest(section: str, key: str) -> str | None:
    """The section or setting that was probably meant: one nearby first, then one of that name elsewhere."""
    here = {path.partition(".")[2]: path for path in _SETTINGS if path.startswith(section + ".")}
    anywhere = {path.partition(".")[2]: path for path in reversed(list(_SETTINGS))}
    for candidates in (here or dict.fromkeys(_SECTIONS), anywhere):
        for word in difflib.get_close_matches(key, candidates, n=1):
            return candidates[word] or word
    return None
