"""What is said of a wrong config file: one sentence with file, line and value, and the nearest thing that is right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpusched.config.known import PLUGINS, SECTIONS, SETTINGS, TABLE_SETTINGS
from gpusched.errors import UsageError
from gpusched.model.spelling import closest
from gpusched.model.units import printable

CHECK_HINT = "see docs/reference/settings.md, and check a file with: gpusched config check"


class SettingsError(UsageError):
    """Settings that cannot be used; `problems` has a sentence for each reason, in the order of the file."""

    def __init__(self, problems: Iterable[UsageError]) -> None:
        self.problems = tuple(problems)
        first, *more = self.problems
        text = f" (and {len(more)} more; see all with: gpusched config check)" if more else ""
        super().__init__(first.message + text, first.hint)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written; as text in `Loaded.origin`."""

    origin: str
    """`file /etc/gpusched/config.toml`, `override`."""
    line: int | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}, line {self.line}"


def wrong(path: str, value: Any, wanted: str, place: Place) -> UsageError:
    """A value that is not allowed."""
    shown = printable(str(value).lower() if isinstance(value, bool) else repr(value), 80)
    return UsageError(f"{place}: {printable(path, 120)} is {shown}; it must be {wanted}", CHECK_HINT)


def unknown_section(name: str, place: Place) -> UsageError:
    """A section, or a key above all sections, that does not exist."""
    near = closest(name, SECTIONS) or _path_of(name)
    return UsageError(f"{place}: there is no section {printable(name, 80)}", _meant(near, "sections", SECTIONS))


def unknown_setting(section: str, key: str, place: Place) -> UsageError:
    """A key that its plain section, or [plugins], does not have."""
    siblings = {path.partition(".")[2]: path for path in SETTINGS if path.partition(".")[0] == section}
    if section == PLUGINS:
        siblings = {"load": f"{PLUGINS}.load"}
    near = siblings.get(closest(key, siblings) or "") or _path_of(key)
    path = printable(f"{section}.{key}", 80)
    return UsageError(f"{place}: there is no setting {path}", _meant(near, f"[{section}] knows", siblings))


def unknown_key(section: str, name: str, key: str, place: Place) -> UsageError:
    """A key that the tables of a named kind do not have."""
    known = TABLE_SETTINGS[section]
    path = printable(f"{section}.{name}.{key}", 120)
    near = closest(key, known)
    return UsageError(f"{place}: there is no setting {path}", _meant(near, f"[{section}.NAME] knows", known))


def no_table(section: str, name: str, place: Place) -> UsageError:
    """A key right below [queue], [qos] or [account], where only tables can be."""
    shown = printable(name, 80)
    if name in TABLE_SETTINGS[section]:
        text = f"{shown} is a setting of one {section}; write it below [{section}.NAME], with the name of the {section}"
    else:
        text = f"{section}.{shown} is a table; write [{section}.{shown}] before its keys"
    return UsageError(f"{place}: {text}", CHECK_HINT)


def _path_of(key: str) -> str | None:
    """The path of the setting that has a name like this, in whatever section; the first of them."""
    anywhere: Mapping[str, str] = {path.partition(".")[2]: path for path in reversed(list(SETTINGS))}
    return anywhere.get(closest(key, anywhere) or "")


def _meant(near: str | None, title: str, otherwise: Iterable[str]) -> str:
    return f"did you mean {near}?" if near else f"{title}: {', '.join(otherwise)}"
