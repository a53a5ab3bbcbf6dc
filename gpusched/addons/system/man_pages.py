"""Manual pages of all commands, from the declarations that --help and the parsers use.

Slurm's commands have pages too, named `gpusched-sbatch` and so on: a machine that has the real `sbatch.1` keeps it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import gpusched
from gpusched import __version__, entry_points
from gpusched.addons.system.system_plan import MARK
from gpusched.cli.actions import ACTIONS, Action
from gpusched.cli.help import ABOUT, AFTER, option_value, options_by_section
from gpusched.cli.job_options import UPDATES
from gpusched.cli.options import TABLES
from gpusched.cli.parse import OptionTable
from gpusched.daemon.arguments import build_parser
from gpusched.slurm_commands import available_commands

"""First line of every page, by which an installation knows its own."""

_WIDTH = 75
_GLYPHS = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}


@dataclass(frozen=True, slots=True)
class ManEntry:
    """A word with its explanation: an option, or an action."""

    head: str
    text: str


@dataclass(frozen=True, slots=True)
class ManSection:
    """A part of a page: its synopsis, paragraphs, entries, parts below it."""

    title: str
    usage: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()
    entries: tuple[ManEntry, ...] = ()
    parts: tuple[ManSection, ...] = ()
    is_literal: bool = False
    """Paragraphs are lines to type, shown as they are."""


@cache
def man_pages(changed_at: float | None = None) -> dict[str, str]:
    """File name -> text of every page.

    Args: changed_at: the date of the pages; default: SOURCE_DATE_EPOCH, else that of the installed package.
    """
    if changed_at is None:
        given = os.environ.get("SOURCE_DATE_EPOCH")
        changed_at = float(given) if given else os.stat(gpusched.__file__).st_mtime
    date = time.strftime("%Y-%m-%d", time.gmtime(changed_at))
    pages = {}
    for command, make in TABLES.items():
        pages[command] = _page(command, ABOUT[command][0], _table_sections(make()), date)
    pages["gpusched"] = _page("gpusched", *_admin(), date)
    pages["gpuschedd"] = _page("gpuschedd", *_daemon(), date)
    for name in available_commands():
        page = f"gpusched-{name}"
        pages[page] = _page(page, f"Slurm's {name} for gpusched.", _slurm_sections(name), date)
    return {f"{name}.1": text for name, text in pages.items()}


# --- what the commands declare ----------------------------------------------------------------------------


def _table_sections(table: OptionTable) -> list[ManSection]:
    about, example, usage = ABOUT[table.command]
    sections = [ManSection("SYNOPSIS", usage=tuple(usage.splitlines()))]
    after = AFTER.get(table.command, "")
    sections.append(ManSection("DESCRIPTION", paragraphs=(about, after) if after else (about,)))
    if table.command == "gctl":
        actions = tuple(ManEntry(f"{one.name} {one.operands}".rstrip(), _action(one)) for one in ACTIONS.values())
        sections.append(ManSection("ACTIONS", entries=actions))
        sections.append(ManSection("UPDATE", paragraphs=(f"gctl update takes: {', '.join(UPDATES)}.",)))
    parts = tuple(
        ManSection(
            title, entries=tuple(ManEntry(", ".join(one.names) + option_value(one), one.help) for one in options)
        )
        for title, options in options_by_section(table).items()
    )
    sections.append(ManSection("OPTIONS", parts=parts))
    return [*sections, ManSection("EXAMPLE", paragraphs=(example,), is_literal=True)]


def _action(action: Action) -> str:
    options = ", ".join(option.names[0] + option_value(option) for option in action.options)
    return f"{action.text}. Options: {options}." if options else f"{action.text}."


def _admin() -> tuple[str, list[ManSection]]:
    from typer.main import get_command

    from gpusched.cli.admin.app import app  # imports the commands that import this module

    group: Any = get_command(app)
    about, *more = _paragraphs(group.help)
    own = ManSection("OPTIONS", entries=tuple(_click_entries(group)))
    commands = ManSection("COMMANDS", parts=tuple(_leaves(group, "gpusched")))
    synopsis = ManSection("SYNOPSIS", usage=("gpusched [OPTIONS] COMMAND [ARGS]...",))
    return about, [synopsis, ManSection("DESCRIPTION", paragraphs=(about, *more)), own, commands]


def _leaves(group: Any, prefix: str) -> Iterator[ManSection]:
    """Every command below a group that is not hidden."""
    for name, command in group.commands.items():
        words = f"{prefix} {name}"
        if getattr(command, "commands", None):
            yield from _leaves(command, words)
        elif not command.hidden:
            operands = [_operand(one) for one in command.params if one.param_type_name == "argument"]
            usage = " ".join([words, "[OPTIONS]", *operands])
            yield ManSection(words, (usage,), tuple(_paragraphs(command.help or "")), tuple(_click_entries(command)))


def _click_entries(command: Any) -> Iterator[ManEntry]:
    for one in command.params:
        if getattr(one, "hidden", False):
            continue
        if one.param_type_name == "argument":
            yield ManEntry(_operand(one), one.help or "")
        else:
            value = "" if one.is_flag or one.count else f" {one.metavar or one.type.name.upper()}"
            names = ", ".join(sorted([*one.opts, *one.secondary_opts], key=lambda name: name.startswith("--")))
            yield ManEntry(names + value, one.help or "")


def _operand(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return f"[{name}]" if not argument.required and not name.startswith("[") else name


def _daemon() -> tuple[str, list[ManSection]]:
    parser = build_parser()
    entries = []
    for action in parser._actions:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
        entries.append(ManEntry(", ".join(action.option_strings) + value, text.replace("%%", "%")))
    about = str(parser.description)
    return about, [
        ManSection("SYNOPSIS", usage=("gpuschedd [OPTIONS]",)),
        ManSection("DESCRIPTION", paragraphs=(about, *_paragraphs(str(parser.epilog)))),
        ManSection("OPTIONS", entries=tuple(entries)),
    ]


def _slurm_sections(name: str) -> list[ManSection]:
    command = entry_points.need(f"slurm.{name}", "slurm", name).COMMAND
    entries = (
        ManEntry(", ".join(one.names) + (f" {one.metavar}" if one.metavar else ""), one.help) for one in command.options
    )
    about = (
        f"{name} with Slurm's options and output, answered by gpusched. Every job has it; for your prompt type: "
        "gpusched slurm-commands install DIR."
    )
    return [
        ManSection("SYNOPSIS", usage=tuple(command.usage.splitlines())),
        ManSection("DESCRIPTION", paragraphs=(about, "An option that is not listed here is an error, never ignored.")),
        ManSection("OPTIONS", entries=tuple(entries)),
    ]


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.replace("\b", "").split("\n\n") if part.strip()]


# --- roff -------------------------------------------------------------------------------------------------


def _page(name: str, about: str, sections: list[ManSection], date: str) -> str:
    lines = [f'.TH {escape(name.upper())} 1 {date} "gpusched {__version__}" "User Commands"', ".nh", ".ad l"]
    lines += [".SH NAME", *_filled(f"{name} - {about[:1].lower()}{about[1:].rstrip('.')}")]
    for section in (*sections, _see_also(name)):
        lines += _section(section, "SH")
    return MARK + "\n".join(lines) + "\n"


def _section(section: ManSection, macro: str) -> Iterator[str]:
    yield f".{macro} {escape(section.title)}"
    if section.usage:
        yield from _literal(section.usage)
    if section.is_literal:
        yield from _literal(section.paragraphs)
    else:
        for number, text in enumerate(section.paragraphs):
            if number or section.usage:
                yield ".PP"
            yield from _filled(text)
    for entry in section.entries:
        yield ".TP"
        yield _bold(entry.head)
        yield from _filled(entry.text)
    for part in section.parts:
        yield from _section(part, "SS")


def _see_also(name: str) -> ManSection:
    others = [f"{other}(1)" for other in (*TABLES, "gpusched") if other != name]
    return ManSection("SEE ALSO", paragraphs=(", ".join(others),))


def _literal(lines: Iterable[str]) -> Iterator[str]:
    yield ".nf"
    yield from (_line(escape(line)) for line in lines)
    yield ".fi"


def _filled(text: str) -> list[str]:
    """The text in source lines of limited width; none is taken for a request."""
    lines, line = [], ""
    for word in escape(text).split():
        if line and len(line) + len(word) >= _WIDTH:
            lines.append(_line(line))
            line = ""
        line = f"{line} {word}" if line else word
    return [*lines, _line(line)] if line else lines


def _bold(head: str) -> str:
    """An option's names in bold, and its value in italics."""
    names: list[str] = []
    value: list[str] = []
    for word in head.split():
        (value if value or not word.startswith("-") else names).append(word)
    if not names:
        return f"\\fB{escape(head)}\\fR"
    shown = f"\\fB{escape(' '.join(names))}\\fR"
    return shown + (f" \\fI{escape(' '.join(value))}\\fR" if value else "")


def escape(text: str) -> str:
    """Text that roff prints as it is: dashes to copy, straight quotes, no escape sequences; one line."""
    found = []
    for sign in text.replace("\n", " ").replace("\t", " "):
        if sign in _GLYPHS:
            found.append(_GLYPHS[sign])
        elif sign.isascii():
            found.append(sign if sign.isprintable() else "")
        else:
            found.append(f"\\[u{ord(sign):04X}]")
    return "".join(found)


def _line(line: str) -> str:
    return f"\\&{line}" if line.startswith(".") else line
