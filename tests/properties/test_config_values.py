"""What is written is what is loaded, and one value out of its range is refused with the line that it is in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.config import SETTINGS, TABLE_SETTINGS, Setting, load_settings, problems_in
from gpusched.config.schema import OF_ADD_ONS, value_of
from gpusched.model.planner_settings import AUTO
from gpusched.model.presets import FAIR, PRESETS, preset
from gpusched.model.rules import (
    Amounts,
    Cells,
    Folder,
    MailServer,
    MemberShares,
    Modules,
    Numbers,
    OneOf,
    Ports,
    Range,
    SomeOf,
    StaticDevices,
    Text,
    Texts,
)
from gpusched.model.settings import Settings
from gpusched.model.value import replace

WORDS = st.text("abcxyz019_.-", min_size=1, max_size=6)
TEXTS = st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), min_size=1, max_size=8)

HARMONIC: Mapping[str, st.SearchStrategy[Any]] = {
    # What could contradict each other, drawn so that it does not.
    "default.time_limit_s": st.integers(1, 1000),
    "queue.default_time_s": st.integers(1, 1000),
    "queue.max_time_s": st.integers(1000, 2000),
    "queue.guaranteed_gpus": st.integers(0, 9),
    "queue.guaranteed_cpus": st.integers(0, 9),
    "queue.guaranteed_mem_mib": st.integers(0, 9),
    "queue.cells": st.lists(st.sampled_from(["1", "2", "n1:2"]), max_size=3),
    "queue.max_cpus": st.integers(9, 50),
    "queue.max_mem_mib": st.integers(9, 50),
    "queue.max_jobs": st.integers(50, 99),
    **{f"{section}.max_gpus_per_job": st.integers(0, 9) for section in ("queue", "qos")},
    **{f"{section}.max_gpus_per_user": st.integers(9, 50) for section in ("queue", "qos")},
    **{f"{section}.max_gpus": st.integers(50, 99) for section in ("queue", "qos")},
    **{f"{section}.max_running_per_user": st.integers(1, 9) for section in ("queue", "qos")},
    **{f"{section}.max_jobs_per_user": st.integers(9, 50) for section in ("queue", "qos")},
}

REFERRING = {"default.queue", "default.qos", "queue.parent", "account.parent", "qos.preempts"}
REFERRING |= {"cluster.engine", "queue.accounts", "qos.accounts", "foreign.exempt_queues", "foreign.kill_after_s"}
REFERRING |= {"queue.burst_after_s", "queue.burst"}
REFERRING |= {"account.gpu_hours", "account.gpu_hours_per_user", "account.when_spent"}
"""They name others, or stand in relation to them; see test_config_tables."""


def right(path: str, setting: Setting) -> st.SearchStrategy[Any]:
    """Values that the setting may have."""
    rule = setting.rule
    if path in HARMONIC:
        return HARMONIC[path]
    if isinstance(rule, Range):
        if setting.type is int:
            return st.integers(int(rule.low) + rule.above, int(rule.high))
        return st.floats(rule.low, rule.high, exclude_min=rule.above)
    if isinstance(rule, OneOf):
        return st.sampled_from(rule.words)
    if isinstance(rule, Text):
        return WORDS if rule.is_word else TEXTS
    if isinstance(rule, Texts):
        return st.lists(WORDS, max_size=3)
    if isinstance(rule, Ports):
        return st.integers(rule.low, 65535 - rule.least).map(lambda low: f"{low}-{low + rule.least}")
    if isinstance(rule, Amounts):
        return st.dictionaries(WORDS, st.integers(1, 9), max_size=3)
    if isinstance(rule, MemberShares):
        named = st.dictionaries(WORDS | st.just("*"), st.integers(1, 9), max_size=3)
        return named | st.lists(WORDS, max_size=3, unique=True) | st.just("*")
    if isinstance(rule, StaticDevices):
        return st.integers(1, 9).map(lambda count: f"{count}xnpu:16GiB+1x8GiB:fpga")
    if isinstance(rule, Folder):
        return WORDS.map(lambda word: "/" + word)
    if isinstance(rule, MailServer):
        return st.just("sendmail:") | WORDS.map(lambda word: f"smtp://{word}?from=gpu@{word}")
    if isinstance(rule, SomeOf):
        return st.lists(st.sampled_from(rule.words), max_size=3, unique=True)
    if isinstance(rule, Numbers):
        return st.lists(st.integers(rule.low, rule.high), max_size=3)
    if isinstance(rule, Modules):
        return st.lists(st.sampled_from(["lab_rules", "lab.rules"]), max_size=2)
    assert setting.type is bool, path
    return st.booleans()


def out_of_range(setting: Setting) -> st.SearchStrategy[Any]:
    """Values of the right type that the setting may not have."""
    rule = setting.rule
    if isinstance(rule, Range):
        low, high = rule.low - (not rule.above), rule.high + 1
        whole = st.one_of(st.integers(-(1 << 62), int(low)), st.integers(int(high), 1 << 62))
        if setting.type is int:
            return whole
        return st.one_of(
            st.floats(max_value=rule.low, exclude_max=not rule.above, allow_infinity=False),
            st.floats(min_value=rule.high, exclude_min=True, allow_infinity=False),
        )
    if isinstance(rule, OneOf):
        return st.sampled_from(["", "none of them", "PACK", "auto "])
    if isinstance(rule, Text):
        blank = ["a b", "\t", "a\nb"] if rule.is_word else ["a\nb", "\r", "\0"]
        return st.sampled_from(blank if rule.may_be_empty else ["", *blank])
    if isinstance(rule, Texts):
        return st.sampled_from([[""], ["a", "b c"], ["a\n"]])
    if isinstance(rule, Ports):
        return st.sampled_from(["", "20000", "1000-2000", "20000-20001", "30000-20000", "65000-65536", "a-b", "-", 3])
    if isinstance(rule, Cells):
        return st.sampled_from([["0"], ["4", "-1"], ["n1:"], [":4"], ["n 1:4"], ["four"], ["1.5"], ["4 "]])
    if isinstance(rule, StaticDevices):
        return st.sampled_from(["", "2xnpu", "0xnpu:16GiB", "2x16GiB", "npu:many", "npu:8G+", 3])
    if isinstance(rule, Folder):
        return st.sampled_from(["", "checkpoints", "./x", "~/x", "/a\nb", 3])
    if isinstance(rule, MailServer):
        return st.sampled_from(["", "smtp.lab.org", "smtp://", "smtp://me:secret@h", "ntfy://topic", "smtp://a b", 3])
    if isinstance(rule, SomeOf):
        return st.sampled_from([[""], ["none of them"], [rule.words[0], "all"], rule.words[0]])
    if isinstance(rule, Numbers):
        return st.sampled_from([[0], [48, -1], ["48"], [1.5], [True], 48])
    if isinstance(rule, Modules):
        return st.sampled_from(["lab_rules", ["lab-rules"], [""], [3], {"a": "b"}])
    if isinstance(rule, Amounts):
        return st.sampled_from([{"a": -1}, {"a": 1, "b": -0.5}, {"": 1}, {"a b": 2}])
    if isinstance(rule, MemberShares):
        return st.sampled_from([{"a": -1}, {"a": 0}, {"": 1}, {"a b": 2}, [""], ["a", "b c"], ["a", 3], "ann", "", 3])
    return st.sampled_from([0, 1, "true", "", []])


@dataclass(frozen=True)
class Line:
    """One setting as the file has it."""

    path: tuple[str, ...]
    setting: Setting = field(repr=False)
    value: Any


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value).lower() if isinstance(value, bool) else repr(value)


def written(lines: list[Line], noise: list[str]) -> tuple[str, dict[tuple[str, ...], int]]:
    """The text of a file, and the line of each setting, counted from 1."""
    text, at, table = "", {}, ()
    for number, line in enumerate(lines):
        text += noise[number % len(noise)]
        if line.path[:-1] != table:
            table = line.path[:-1]
            text += f"[{'.'.join(toml(name) for name in table)}]\n"
        at[line.path] = text.count("\n") + 1
        text += f"{toml(line.path[-1])} = {toml(line.value)} # weight = -1\n"
    return text, at


@st.composite
def configs(draw: st.DrawFn, *, at_least: int = 0) -> list[Line]:
    """Settings of a file that is right, those of one table one after the other."""
    names = draw(st.lists(WORDS, max_size=2, unique=True))
    found = []
    if names:
        found.append(Line(("default", "queue"), SETTINGS["default.queue"], names[0]))
    for path, setting in SETTINGS.items():
        if path not in REFERRING and draw(st.integers(0, 5)) == 0:
            found.append(Line(tuple(path.split(".")), setting, draw(right(path, setting))))
    if names:
        found.sort(key=lambda line: line.path[0])
    for name in names:
        for section, known in TABLE_SETTINGS.items():
            one = [
                Line((section, name, key), setting, draw(right(f"{section}.{key}", setting)))
                for key, setting in known.items()
                if f"{section}.{key}" not in REFERRING and draw(st.integers(0, 3)) == 0
            ]
            # A queue that jobs go to by default has to be there.
            if one or "users" in known:
                found += one or [Line((section, name, "users"), known["users"], {} if section == "account" else [])]
    if len(found) < at_least:
        found.append(Line(("gpu", "free_polls"), SETTINGS["gpu.free_polls"], 3))
    return found


NOISE = st.lists(st.sampled_from(["", "\n", "# [queue.a]\n", "  # x = '''\n\n"]), min_size=1, max_size=3)


def loaded_value(settings: Any, path: tuple[str, ...]) -> Any:
    """What the settings have for a path of the file."""
    if path == ("plugins", "load"):
        return list(settings.plugins)
    if path[0] in OF_ADD_ONS:
        settings, path = value_of(settings, ".".join(path)), ()
    for name in path:
        settings = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
    return list(settings) if isinstance(settings, tuple) else settings


def meant(line: Line) -> Any:
    """The value as it is once loaded: members are names with their shares however they are written."""
    if isinstance(line.setting.rule, MemberShares) and not isinstance(line.value, dict):
        return dict.fromkeys(line.value, 1.0)
    return line.value


def file_with(text: str) -> str:
    """A file that holds this, for one example."""
    folder = tempfile.mkdtemp(prefix="gpusched-config-")
    path = Path(folder) / "config.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)


def removed(path: str) -> None:
    Path(path).unlink()
    Path(path).parent.rmdir()


@given(configs(), NOISE)
def test_written_values_load_with_their_line_and_the_rest_is_default(lines: list[Line], noise: list[str]) -> None:
    text, at = written(lines, noise)
    path = file_with(text)
    try:
        loaded = load_settings(path, {})
    finally:
        removed(path)
    for line in lines:
        assert loaded_value(loaded.settings, line.path) == meant(line), line.path
        assert loaded.origin[".".join(line.path)] == f"file {path}, line {at[line.path]}"
    said = {".".join(line.path) for line in lines}
    name = loaded.settings.priority.preset
    by_preset = PRESETS[FAIR if name == AUTO else name]
    for known, value, origin in loaded.values():
        is_of_preset = known not in said and known.removeprefix("priority.") in by_preset
        assert (origin == "default") == (known not in said and not is_of_preset), (known, value, origin)
        assert origin.startswith("preset ") == is_of_preset
    untouched = replace(Settings(), priority=preset(name))
    for known in SETTINGS:
        if known not in said:
            assert value_of(loaded.settings, known) == value_of(untouched, known)


@given(configs(at_least=1), NOISE, st.data())
def test_a_single_value_out_of_range_is_refused_with_its_line(
    lines: list[Line], noise: list[str], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(lines) - 1))
    good = lines[number]
    lines[number] = Line(good.path, good.setting, data.draw(out_of_range(good.setting)))
    text, at = written(lines, noise)
    path = file_with(text)
    try:
        (problem,) = problems_in(path, {})
    finally:
        removed(path)
    assert problem.message.startswith(f"file {path}, line {at[good.path]}: {'.'.join(good.path)} is ")
    assert problem.hint


def test_every_kind_of_rule_is_covered() -> None:
    known = [*SETTINGS.values(), *(one for table in TABLE_SETTINGS.values() for one in table.values())]
    plain = {Range, OneOf, SomeOf, Text, Texts, Ports, Folder, MailServer, Numbers, type(None)}
    drawn = plain | {Cells, Amounts, MemberShares, Modules, StaticDevices}
    assert {type(one.rule) for one in known} == drawn
