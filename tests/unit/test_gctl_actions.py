"""gctl's actions: each has its own options and help, and refuses the options of others by name."""

from __future__ import annotations

import inspect
import shlex

import pytest
from click.shell_completion import BashComplete

from gpusched.cli.actions import ACTIONS, find_action, gctl_table
from gpusched.cli.gctl import body
from gpusched.cli.help import click_command, help_text, options_by_section
from gpusched.cli.parse import common_options, parse
from gpusched.errors import UsageError


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_names_what_it_runs_and_its_example_is_one_of_its_command_lines(name: str) -> None:
    action = ACTIONS[name]
    assert action.function() is not None
    assert len(inspect.signature(action.function()).parameters) == 3
    for example in action.example.split(", gctl "):
        words = shlex.split(example.partition(" >")[0].removeprefix("gctl "))
        found = find_action(parse(gctl_table(), words, operands_first=True)[1])
        assert found is action
        parse(action.table(), words, operands_first=True)


@pytest.mark.parametrize("name", ACTIONS)
def test_the_help_of_an_action_has_its_options_and_no_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert body([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    table = ACTIONS[name].table()
    assert text == help_text(table)
    assert f"\nusage: gctl {name} [OPTIONS]" in text
    named = {
        word.strip() for line in text.splitlines() if line.startswith("  -") for word in line.split("  ")[1].split(",")
    }
    assert {word.split()[0] for word in named} == {name for option in table.options for name in option.names}


def test_the_help_of_gctl_says_of_each_option_which_actions_take_it() -> None:
    found = options_by_section(gctl_table())
    assert [option.long for option in found["With requeue"]] == ["--hold"]
    assert [option.long for option in found["With hold, release, account: which jobs"]] == ["--me"]
    shown = [option.long for options in found.values() for option in options]
    assert sorted(shown) == sorted(option.long for option in gctl_table().options)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("hold 1 --start now", "unknown option '--start' for gctl hold; it belongs to: reserve", "gctl hold --help"),
        ("--star now hold 1", "unknown option '--star' for gctl hold; it belongs to: reserve", "gctl hold --help"),
        ("drain --confirm 0", "unknown option '--confirm' for gctl drain; it belongs to: down", "gctl drain --help"),
        (
            "queue vision --to x",
            "unknown option '--to' for gctl queue; it belongs to: account remove, queue remove, qos remove",
            "gctl queue --help",
        ),
        ("hold --colour", "unknown option '--colour'", "list them with: gctl hold --help"),
        ("--colour", "unknown option '--colour'", "list them with: gctl --help all"),
        ("hold --al=1", "--al takes no value", "see: gctl hold --help"),
        ("log --since", "--since needs a value", "see: gctl log --help"),
        ("qos night", "gctl qos has no night", "it has: add, modify, remove; see gctl --help"),
        ("polish", "unknown action 'polish'", "actions: hold, release, "),
    ],
)
def test_a_mistake_is_one_sentence_and_the_help_to_read(words: str, error: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        body(words.split())
    assert raised.value.message == error
    assert hint in raised.value.hint


def test_options_stand_before_or_behind_the_action_and_may_be_short_for_one_of_it() -> None:
    for words in (["--dur", "4h", "reserve", "x"], ["reserve", "x", "--dur", "4h"], ["reserve", "--du=4h", "x"]):
        operands = parse(gctl_table(), words, operands_first=True)[1]
        action = find_action(operands)
        assert action is not None
        assert parse(action.table(), words, operands_first=True)[0] == {"duration_s": 14400}
    # Of all actions --mem, --message, --maint and --me begin so.
    with pytest.raises(UsageError, match="is short for"):
        parse(gctl_table(), ["down", "lab1", "--m", "why"], operands_first=True)
    assert parse(ACTIONS["down"].table(), ["down", "lab1", "--m", "why"], operands_first=True)[0] == {"message": "why"}


def test_every_action_has_the_common_options() -> None:
    common = {name for option in common_options() for name in option.names}
    for action in ACTIONS.values():
        names = [name for option in action.table().options for name in option.names]
        assert common <= set(names)
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gctl requ", ["requeue"]),
        ("gctl requeue --", ["--hold", "--json", "--quiet", "--help", "--version", "--completion"]),
        ("gctl -m why drain --c", ["--completion"]),
        ("gctl queue pa", ["pause"]),
        ("gctl queue pause --me", ["--message"]),
        ("gctl --jud", ["--judge"]),
    ],
)
def test_a_shell_completes_the_options_of_the_action_that_was_typed(line: str, offered: list[str]) -> None:
    command, *before, last = line.split(" ")
    kind = BashComplete(click_command(gctl_table()), {}, command, "X")
    assert [one.value for one in kind.get_completions(before, last)] == offered
