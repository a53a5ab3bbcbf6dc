"""Manual pages: every command and option has its entry, and roff prints the text as it is declared."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from gpusched.addons.system.man_pages import MARK, escape, man_pages
from gpusched.addons.system.system_plan import COMMANDS
from gpusched.cli.actions import ACTIONS
from gpusched.cli.admin.app import app
from gpusched.cli.options import TABLES
from gpusched.slurm_commands import available_commands

NEEDS_GROFF = pytest.mark.skipif(shutil.which("groff") is None, reason="no groff to render pages with")


def rendered(text: str, width: int = 78, device: str = "ascii") -> str:
    """A page as a plain terminal shows it. Fails with what groff warns of."""
    done = subprocess.run(
        ["groff", "-man", f"-T{device}", "-ww", "-P-cbou", f"-rLL={width}n"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """All pages as a terminal shows them, by command; one process renders them all."""
    pages = man_pages()
    everything = rendered("".join(pages.values()), 1000)
    parts = re.split(r"^(?=\S+\(1\) {2,}User Commands)", everything, flags=re.M)[1:]
    assert len(parts) == len(pages)
    return dict(zip((name.removesuffix(".1") for name in pages), parts, strict=True))


def leaves(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def test_every_command_has_a_page() -> None:
    assert set(man_pages()) == {
        f"{name}.1" for name in (*COMMANDS, *(f"gpusched-{one}" for one in available_commands()))
    }
    for name, text in man_pages().items():
        assert text.startswith(f"{MARK}.TH {escape(name.removesuffix('.1').upper())} 1 ")


@NEEDS_GROFF
@pytest.mark.parametrize("command", TABLES)
def test_options_of_the_tables_are_explained(command: str, shown: dict[str, str]) -> None:
    entries = shown[command].split("\nOPTIONS\n")[1]
    for option in TABLES[command]().options:
        head = ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
        assert re.search(rf"^ +{re.escape(head)}.*\s+{re.escape(option.help[:30])}", entries, re.M), option.names
    if command == "gctl":
        for name in ACTIONS:
            assert re.search(rf"^ +{name}\b", shown[command].split("\nACTIONS\n")[1], re.M), name


@NEEDS_GROFF
@pytest.mark.parametrize("name", available_commands())
def test_options_of_slurms_commands_are_explained(name: str, shown: dict[str, str]) -> None:
    for option in importlib.import_module(f"gpusched.addons.slurm.{name}").COMMAND.options:
        head = ", ".join(option.names)
        assert re.search(rf"^ +{re.escape(head)}\b.*\s+{re.escape(option.help[:20])}", shown[f"gpusched-{name}"], re.M)


@NEEDS_GROFF
def test_every_subcommand_of_gpusched_is_explained_with_its_options(shown: dict[str, str]) -> None:
    page = shown["gpusched"].split("\nCOMMANDS\n")[1]
    found = list(leaves(get_command(app), "gpusched"))
    assert len(found) > 30
    for words, command in found:
        if command.hidden:
            assert f"   {words}\n" not in page
            continue
        part = page.split(f"\n   {words}\n")[1] if f"\n   {words}\n" in page else page.removeprefix(f"   {words}\n")
        part = re.split(r"^ {3}\S", part, flags=re.M)[0]
        assert " ".join(command.help.split())[:20] in " ".join(part.split()), words
        for option in command.params:
            names = option.opts if option.param_type_name == "option" else [option.metavar or option.name.upper()]
            assert all(re.search(rf"^ +.*(?<![\w-]){re.escape(name)}(?!\w)", part, re.M) for name in names), (
                words,
                names,
            )


@NEEDS_GROFF
def test_the_daemons_options_are_explained(shown: dict[str, str]) -> None:
    for name in ("--ready-fd N", "--system", "--root DIR", "--version", "-h, --help"):
        assert re.search(rf"^ +{name}(\s|$)", shown["gpuschedd"], re.M), name


@pytest.mark.parametrize(
    ("command", "is_there"),
    [
        pytest.param(["mandoc", "-Tlint", "-Wwarning"], shutil.which("mandoc"), id="mandoc"),
        pytest.param(["groff", "-man", "-Tutf8", "-ww", "-z"], shutil.which("groff"), id="groff"),
        pytest.param(["man", "--warnings", "-l"], shutil.which("man"), id="man"),
    ],
)
def test_pages_are_rendered_without_warnings(command: list[str], is_there: str | None, tmp_path: Path) -> None:
    if not is_there:
        pytest.skip(f"there is no {command[0]}")
    for name, text in man_pages().items():
        (tmp_path / name).write_text(text)
    names = sorted(man_pages())
    done = subprocess.run([*command, *names], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if command[0] == "mandoc":
        assert done.stdout == ""


@NEEDS_GROFF
@pytest.mark.parametrize(
    ("device", "lines"),
    [
        (
            "ascii",
            [".so /etc/passwd", "'br", "\\fBbold\\fR \\n(.z", "--gpu-type 'a100' \"x\"", "~user ^a `b`", ".", "\\"],
        ),
        ("utf8", ["caf\u00e9 \u2026"]),
    ],
)
def test_hostile_text_is_printed_as_it_is(device: str, lines: list[str]) -> None:
    page = ".TH X 1 2026-01-01\n.SH NAME\n.nf\n" + "\n".join(f"x{escape(line)}" for line in lines) + "\n"
    shown = [line.strip() for line in rendered(page, device=device).splitlines()]
    assert [line for line in shown if line.startswith("x")] == [f"x{line}" for line in lines]


@given(st.text(max_size=40))
def test_escaped_text_is_one_line_of_ascii_without_requests(text: str) -> None:
    escaped = escape(text)
    assert escaped.isascii()
    assert "\n" not in escaped
    assert not escaped.startswith("'")
    assert set(re.findall(r"\\(.)", escaped)) <= set("e-([")


def test_pages_of_one_date_are_equal_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ".TH GSUB 1 1970-01-02 " in man_pages(86400.0)["gsub.1"]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    man_pages.cache_clear()
    try:
        assert man_pages() == man_pages(86400.0)
    finally:
        man_pages.cache_clear()
