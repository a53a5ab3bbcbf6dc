"""Every key is found in the line in which it was written, whatever stands around it."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.config.lines import lines_of

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
def test_every_key_is_found_and_nothing_else(text):
    document = tomllib.loads(text)
    found = lines_of(text)
    wanted = keys_of(document)
    # `[a.b]` makes `a` without writing it down.
    assert set(found) <= wanted
    assert {key for key in wanted if key not in found} <= {key[:-1] for key in found if len(key) > 1} | {
        key[:1] for key in found
    }


@given(documents(), st.integers(0, 3))
def test_the_line_is_that_of_the_key(text, blank):
    text = "\n" * blank + text
    lines = text.split("\n")
    for key, line in lines_of(text).items():
        shown = lines[line - 1]
        assert key[-1] in shown or key[-1].replace('"', '\\"') in shown


@given(documents())
def test_carriage_returns_change_nothing(text):
    assert lines_of(text.replace("\n", "\r\n").replace("\r\n", "\n")) == lines_of(text)
