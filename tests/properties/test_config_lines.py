"""Every key is found in the line in which it was written, whatever stands around it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.config.toml_lines import lines_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BARE = st.text("abcdefgh_-019", min_size=1, max_size=5)
QUOTED = st.sampled_from(['"a b"', "'c.d'", '"x # y"', '"e = f"', "'[g]'", '"q\\"r"'])
KEYS = st.one_of(BARE, QUOTED)
VALUES = st.sampled_from(
    [
        "1",
        "-2.5",
        "true",
        "1979-05-27T07:32:00Z",
        '"a # text"',
        "'it [is] = one'",
        '"with \\" quote"',
        '"""\nseveral = 1\n[lines]\n"""',
        "'''one\n# two\n'''",
        '"""ends in quotes"""""',
        '"""an escaped \\"""quote\nb = 2"""',
        "[1, 2, 3]",
        "[\n  1, # one\n  2,\n]",
        "[\"a]\", 'b']",
        "[[1], [2, 3]]",
        "[]",
        "{}",
    ]
)
NOISE = st.sampled_from(["", "\n", "# a = 1\n", "  # [x]\n\n", "\n\n"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A TOML text of a few tables, with comments and blank lines everywhere."""
    parts = [draw(NOISE)]
    for number in range(draw(st.integers(0, 4))):
        if number or draw(st.booleans()):
            names = [draw(KEYS) for _ in range(draw(st.integers(1, 2)))]
            parts.append(f"[t{number}.{' . '.join(names)}]{draw(st.sampled_from(['', ' # so']))}\n{draw(NOISE)}")
        for place in range(draw(st.integers(0, 3))):
            inline = f"{{ i{place} = {draw(VALUES)}, {draw(BARE)}z = 3 }}"
            simple = draw(st.one_of(VALUES, VALUES, st.just(inline)))
            if "\n" in simple and simple.startswith("{"):
                simple = "4"
            key = draw(st.sampled_from([f"k{place}", f'"k {place}"', f"d{place}.e{place}"]))
            parts.append(f"{key} = {simple}{draw(st.sampled_from(['', ' # end']))}\n{draw(NOISE)}")
    return "".join(parts)


def keys_of(document: dict[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Paths of all keys, tables included."""
    found = set()
    for name, value in document.items():
        found.add((*above, name))
        if isinstance(value, dict):
            found |= keys_of(value, (*above, name))
    return found


@given(documents())
def test_exactly_the_keys_are_found(text):
    document = tomllib.loads(text)
    found = lines_of(text)
    wanted = keys_of(document)
    # `[a.b]` makes `a` without writing it down.
    assert set(found) <= wanted
    assert {key for key in wanted if key not in found} <= {key[:-1] for key in found if len(key) > 1} | {
        key[:1] for key in found
    }


@dataclass
class Draft:
    """A text that is being written, and the line of every key in it."""

    text: str = ""
    at: dict[tuple[str, ...], int] = field(default_factory=dict)

    def note(self, key: tuple[str, ...]) -> None:
        """This key comes next."""
        self.at.setdefault(key, self.text.count("\n") + 1)


SPELLINGS = {"a": ["a", '"a"', "'a'", '"\\u0061"'], "b c": ['"b c"', "'b c'"], "d.e": ['"d.e"'], 'f"': ['"f\\""']}
GAPS = st.sampled_from(["", " ", "\t"])


@st.composite
def placed(draw: st.DrawFn) -> Draft:
    """Few names, used again and again in tables, inline tables and dotted keys, each written in several ways."""
    draft = Draft()

    def spell(names: tuple[str, ...]) -> str:
        return f"{draw(GAPS)}.{draw(GAPS)}".join(draw(st.sampled_from(SPELLINGS[name])) for name in names)

    def fill(table: tuple[str, ...], ends: str, most: int) -> None:
        for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(SPELLINGS)), max_size=most, unique=True))):
            below = draw(st.sampled_from([(), (), ("a",), ("d.e", "a")]))
            if ends == ", ":
                draft.text += ends if number else ""
            else:
                draft.text += draw(NOISE)
            for length in range(len(below) + 1):
                draft.note((*table, name, *below[:length]))
            draft.text += f"{spell((name, *below))}{draw(GAPS)}={draw(GAPS)}"
            value((*table, name, *below))
            if below and draw(st.booleans()):
                draft.text += ends
                draft.note((*table, name, 'f"'))
                draft.text += spell((name, 'f"')) + " = 1"
            if ends != ", ":
                draft.text += f"{draw(st.sampled_from(['', ' # a = 1']))}\n"

    def value(key: tuple[str, ...]) -> None:
        kind = draw(st.integers(0, 5))
        if kind == 0:
            draft.text += "{ "
            fill(key, ", ", 2)
            draft.text += " }"
        elif kind == 1:
            draft.text += "[ # [a]\n  { "
            fill(key, ", ", 2)
            draft.text += " }, # } a = 2\n]"
        else:
            draft.text += draw(VALUES)

    fill((), "\n", 3)
    for number in range(draw(st.integers(0, 3))):
        opening, closing = draw(st.sampled_from([("[", "]"), ("[ ", " ]"), ("[[", "]]")]))
        below = draw(st.sampled_from([(), ("a",), ("b c", "d.e")]))
        draft.text += draw(NOISE)
        draft.note((f"t{number}", *below))
        draft.text += f"{opening}t{number}{''.join('.' + spell((name,)) for name in below)}{closing}\n"
        fill((f"t{number}", *below), "\n", 3)
    return draft


@given(placed())
def test_each_line_belongs_to_its_key(draft: Draft) -> None:
    tomllib.loads(draft.text)
    assert lines_of(draft.text) == draft.at


@given(documents())
def test_carriage_returns_change_nothing(text):
    assert lines_of(text.replace("\n", "\r\n").replace("\r\n", "\n")) == lines_of(text)
