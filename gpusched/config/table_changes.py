"""What `gctl account`, `queue` and `qos` change in a config file: words as typed to changes of its tables.

Only what is typed is read here; whether the settings then make sense is checked as for a file written by hand.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

from gpusched.config.document import KeyChange
from gpusched.config.schema import TABLE_SETTINGS, Setting
from gpusched.errors import NotFound, Refused, UsageError
from gpusched.model.queue_settings import EVERYBODY
from gpusched.model.rules import WORD, MemberShares
from gpusched.model.settings import DefaultSettings
from gpusched.model.units import closest, parse_duration_s, parse_size_mib, printable

Document = Mapping[str, Any]
"""A config file as `tomllib` reads it."""

SHORT = {"queue": {"gpus": "guaranteed_gpus", "cpus": "guaranteed_cpus", "mem": "guaranteed_mem_mib"}}
"""Words for settings of a queue that are longer in the file."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_PARENTS = ("account", "queue")


def added(document: Document, section: str, name: str, pairs: Sequence[str]) -> list[KeyChange]:
    """A new table; with the first queue, the default queue along. Raises: Refused if it exists, UsageError."""
    if name in document.get(section, {}):
        raise Refused(
            f"{section} {printable(name, 60)} exists already", f"change it with: gctl {section} modify {name}"
        )
    if not WORD.admits(name):
        shown = printable(repr(name), 60)
        raise UsageError(f"{shown} cannot be the name of a {section}; it must be {WORD}", f"see: gctl {section}")
    new = KeyChange((section, name), {key: value for key, value in _read(section, pairs) if value is not None})
    default = along(document, section, name)
    return [new] if default is None else [KeyChange((section, default), {}), new]


def along(document: Document, section: str, name: str) -> str | None:
    """The default queue, if a first queue of another name needs it: jobs without -q go on to be accepted."""
    default = document.get("default", {}).get("queue", DefaultSettings().queue)
    return default if section == "queue" and not document.get("queue") and name != default else None


def modified(document: Document, section: str, name: str, pairs: Sequence[str]) -> list[KeyChange]:
    """Other values in a table; an empty one removes the key. Raises: NotFound, UsageError."""
    check_exists(document, section, name)
    if not pairs:
        raise UsageError("nothing to change", f"for example: gctl {section} modify {name} {_EXAMPLES[section]}")
    return [KeyChange((section, name, key), value) for key, value in _read(section, pairs)]


_EXAMPLES = {"account": "shares=4", "queue": "max_gpus=4", "qos": "tier=-1"}


def members_changed(document: Document, name: str, words: Sequence[str]) -> list[KeyChange]:
    """Members added and removed: `add=bob:2,dora remove=carl`. Raises: NotFound, Refused, UsageError."""
    check_exists(document, "account", name)
    raw = document["account"][name].get("users", [])
    if raw == EVERYBODY:
        hint = f"list them with: gctl account modify {name} users=ann,bob"
        raise Refused(f'the members of account {name} are all users ("*")', hint)
    users: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else dict.fromkeys(raw, 1)
    before = dict(users)
    for word in words:
        verb, equals, text = word.partition("=")
        if verb not in ("add", "remove") or not equals or not text:
            hint = f"for example: gctl account members {name} add=bob:2 remove=carl"
            raise UsageError(f"{printable(word, 40)!r} is neither add=NAMES nor remove=NAMES", hint)
        for member in text.split(","):
            if verb == "add":
                users.update(_shares([member]))
            elif member not in users:
                near = closest(member, users)
                hint = f"did you mean {near}?" if near else f"see: gctl account {name}"
                raise NotFound(f"{printable(member, 40)} is not a member of account {name}", hint)
            else:
                del users[member]
    if not words:
        raise UsageError("no member was given", f"for example: gctl account members {name} add=bob:2 remove=carl")
    if users == before:
        return []
    return [KeyChange(("account", name, "users"), _members(users, is_table=isinstance(raw, Mapping)))]


def removed(document: Document, section: str, name: str, to: str | None) -> list[KeyChange]:
    """A table gone. With `to`, what is below it and names it moves there. Raises: NotFound, Refused."""
    check_exists(document, section, name)
    tables: Mapping[str, Any] = document.get(section, {})
    if to is not None:
        check_exists(document, section, to)
        if to == name:
            raise UsageError(f"{section} {name} cannot move to itself", f"see: gctl {section}")
    children = [one for one, table in tables.items() if section in _PARENTS and table.get("parent") == name]
    if children and to is None:
        names = ", ".join(children)
        raise Refused(
            f"{section} {name} has {section}s below it: {names}",
            f"move them with: gctl {section} remove {name} --to NAME",
        )
    changes = [KeyChange((section, child, "parent"), to) for child in children if child != to]
    if to in children:
        # The new parent takes the place of the one that goes.
        changes.append(KeyChange((section, to, "parent"), tables[name].get("parent")))
    for other, key in (("queue", "accounts"), ("qos", "accounts"), ("qos", "preempts")):
        if (key == "accounts") != (section == "account") or section == "queue":
            continue
        for one, table in document.get(other, {}).items():
            if name in table.get(key, ()) and (to is not None or key == "preempts") and one != name:
                kept = [to if word == name else word for word in table[key]]
                changes.append(KeyChange((other, one, key), [word for word in dict.fromkeys(kept) if word]))
    if section == "queue" and to is not None and document.get("default", {}).get("queue") == name:
        changes.append(KeyChange(("default", "queue"), to))
    return [*changes, KeyChange((section, name), None)]


def check_exists(document: Document, section: str, name: str) -> None:
    """Raises: NotFound with the nearest name."""
    known = document.get(section, {})
    if name not in known:
        near = closest(name, known)
        hint = f"did you mean {near}?" if near else f"add it with: gctl {section} add {printable(name, 60)}"
        raise NotFound(f"the config file has no {section} {printable(name, 60)}", hint)


def _read(section: str, pairs: Sequence[str]) -> list[tuple[str, Any]]:
    known, found = TABLE_SETTINGS[section], {}
    for pair in pairs:
        word, equals, text = pair.partition("=")
        if not equals:
            hint = f"for example: gctl {section} modify NAME {_EXAMPLES[section]}"
            raise UsageError(f"{printable(pair, 60)!r} is not of the form KEY=VALUE", hint)
        key = _key(section, word)
        if key in found:
            raise UsageError(f"{printable(word, 40)} is given twice", f"see: gctl {section}")
        found[key] = _value(known[key], text) if text else None
    return list(found.items())


def _key(section: str, word: str) -> str:
    known = TABLE_SETTINGS[section]
    key = word.lower().replace("-", "_")
    key = SHORT.get(section, {}).get(key, key)
    for name in (key, f"{key}_s", f"{key}_mib"):
        if name in known:
            return name
    near = closest(key, known)
    hint = f"did you mean {near}?" if near else f"it has: {', '.join(known)}"
    raise UsageError(f"[{section}.NAME] has no setting {printable(word, 40)!r}", hint)


def _value(setting: Setting, text: str) -> Any:
    """The value as it is written in a file. Raises: UsageError."""
    try:
        value = _converted(setting, text)
        setting.read(value)
    except ValueError:
        shown = printable(text, 60)
        raise UsageError(
            f"{setting.key} is {shown!r}; it must be {setting.allowed}", "see docs/reference/settings.md"
        ) from None
    return value


def _converted(setting: Setting, text: str) -> Any:
    kind = setting.type
    if isinstance(setting.rule, MemberShares):
        return EVERYBODY if text == EVERYBODY else _members(_shares(text.split(",")), is_table=False)
    if kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError
        return text.lower() in _TRUE
    if kind in (int, float):
        if setting.key.endswith("_s"):
            return parse_duration_s(text)
        if setting.key.endswith("_mib"):
            return parse_size_mib(text)
        if not text.isascii() or "_" in text:
            raise ValueError
        number = float(text)
        return int(text) if text.lstrip("+-").isdigit() else number
    if typing.get_origin(kind) is tuple:
        return [word for word in text.split(",") if word]
    return text


def _shares(members: Sequence[str]) -> dict[str, Any]:
    """`bob:2` to bob with 2 shares. Raises: UsageError."""
    found: dict[str, Any] = {}
    for member in members:
        name, colon, shares = member.partition(":")
        try:
            number = float(shares) if colon else 1.0
        except ValueError:
            number = 0.0
        if not WORD.admits(name) or name == EVERYBODY or not 0 < number <= 1e9:
            raise UsageError(f"{printable(member, 40)!r} is not a member", "write NAME or NAME:SHARES, such as bob:2")
        found[name] = int(number) if number.is_integer() else number
    return found


def _members(users: Mapping[str, Any], *, is_table: bool) -> Any:
    """A list while each has one share, as people write it."""
    return dict(users) if is_table or any(shares != 1 for shares in users.values()) else list(users)
