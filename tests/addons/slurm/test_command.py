"""Options of Slurm's commands, read as glibc's getopt_long reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.command import VERSION, Command, CommandError, Parsed, parse, run

ROWS = """
-n --ntasks N  tasks
-N --nodes N  nodes
--nodelist NAMES  these nodes
-H --hold  hold
--nice [N]  niceness
-q --qos NAME  quality of service
-Q --quiet  no messages
-a --array --tasks LIST  array
"""
COMMAND = Command("demo", "demo [OPTIONS] WORD...", ROWS, bad_option_code=255)
PERMUTING = Command("demo", "demo [OPTIONS] WORD...", ROWS, permutes=True)


@pytest.mark.parametrize(
    ("words", "options", "operands"),
    [
        ("", [], ""),
        ("a -H", [], "a -H"),
        ("-H a", [("hold", None)], "a"),
        ("-n 4", [("ntasks", "4")], ""),
        ("-n4", [("ntasks", "4")], ""),
        ("-Hn4 x", [("hold", None), ("ntasks", "4")], "x"),
        ("-HQ", [("hold", None), ("quiet", None)], ""),
        ("--ntasks=4", [("ntasks", "4")], ""),
        ("--ntasks 4", [("ntasks", "4")], ""),
        ("--ntasks=", [("ntasks", "")], ""),
        ("--nt 4", [("ntasks", "4")], ""),
        ("--nodes 4", [("nodes", "4")], ""),
        ("--nodel x", [("nodelist", "x")], ""),
        ("--nice", [("nice", None)], ""),
        ("--nice 5", [("nice", None)], "5"),
        ("--nice=5", [("nice", "5")], ""),
        ("--tasks 1", [("array", "1")], ""),
        ("-a1 --array=2", [("array", "1"), ("array", "2")], ""),
        ("-H -- -n", [("hold", None)], "-n"),
        ("-", [], "-"),
        ("-n -4", [("ntasks", "-4")], ""),
    ],
)
def test_options_are_read_as_getopt_does(words: str, options: list[tuple[str, str | None]], operands: str) -> None:
    parsed = parse(COMMAND, words.split())
    assert parsed.options == options
    assert parsed.operands == operands.split()


def test_options_may_follow_operands_where_the_command_permutes() -> None:
    parsed = parse(PERMUTING, ["1", "-H", "2", "--", "-n"])
    assert parsed.options == [("hold", None)]
    assert parsed.operands == ["1", "2", "-n"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nosuch", "demo: unrecognized option '--nosuch'"),
        ("--nosuch=1", "demo: unrecognized option '--nosuch=1'"),
        ("-z", "demo: invalid option -- 'z'"),
        ("-Hz", "demo: invalid option -- 'z'"),
        ("--ntasks", "demo: option '--ntasks' requires an argument"),
        ("-n", "demo: option requires an argument -- 'n'"),
        ("--hold=1", "demo: option '--hold' doesn't allow an argument"),
        ("--node", "demo: option '--node' is ambiguous; possibilities: '--nodes' '--nodelist'"),
    ],
)
def test_a_wrong_option_is_refused_in_the_words_of_getopt(words: str, message: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse(COMMAND, words.split())
    assert caught.value.text == f'{message}\nTry "demo --help" for more information'
    assert caught.value.code == 255


@given(st.lists(st.text("-=HnQaN1x ", max_size=6), max_size=6))
def test_any_words_are_parsed_or_refused(words: list[str]) -> None:
    for command in (COMMAND, PERMUTING):
        try:
            parsed = parse(command, words)
        except CommandError:
            continue
        assert {name for name, _ in parsed.options} <= {option.long.lstrip("-") for option in command.options}


def test_the_last_value_wins_and_all_are_kept_in_order() -> None:
    parsed = parse(COMMAND, ["-n1", "--nice", "-n", "2"])
    assert (parsed.get("ntasks"), parsed.all("ntasks")) == ("2", ["1", "2"])
    assert (parsed.has("nice"), parsed.get("nice", "100"), parsed.get("qos", "normal")) == (True, "100", "normal")


@pytest.mark.parametrize(
    ("word", "first"), [("--version", VERSION), ("--help", "Usage: demo"), ("--usage", "Usage: demo")]
)
def test_every_command_has_version_help_and_usage(word: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(parsed: Parsed) -> int:
        raise AssertionError("the body must not run")

    assert run(COMMAND, body, [word]) == 0
    assert capsys.readouterr().out.startswith(first)


def test_an_error_of_the_body_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    def body(parsed: Parsed) -> int:
        raise COMMAND.error("one\ntwo", 210)

    assert run(COMMAND, body, []) == 210
    assert capsys.readouterr().err == "demo: error: one\ndemo: error: two\n"
