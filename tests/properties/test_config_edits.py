"""Settings changed by command: the file says what was wanted, and every line that was not meant stays as it was."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.config import edit
from gpusched.config.document import KeyChange, changed
from gpusched.config.edit import sections, with_changes, written
from gpusched.errors import Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = st.sampled_from(["vision", "speech", "nlp.x", "a b", "ü"])
KEYS = st.sampled_from(["shares", "parent", "users", "max_gpus"])
USERS = st.sampled_from(["ann", "bob", "carl", "dora"])
VALUES = st.one_of(
    st.integers(0, 9),
    st.floats(0.25, 8, width=16),
    st.booleans(),
    st.sampled_from(["lab", 'q"uote', "back\\slash", "\x7f\t"]),
    st.lists(USERS, unique=True, max_size=3),
    st.dictionaries(USERS, st.integers(1, 4), max_size=3),
)
SECTIONS = st.sampled_from(["account", "queue"])
CHANGES = st.one_of(
    st.builds(lambda section, name: KeyChange((section, name), None), SECTIONS, NAMES),
    st.builds(lambda section, name: KeyChange((section, name), {}), SECTIONS, NAMES),
    st.builds(lambda section, name, key: KeyChange((section, name, key), None), SECTIONS, NAMES, KEYS),
    st.builds(lambda section, name, key, value: KeyChange((section, name, key), value), SECTIONS, NAMES, KEYS, VALUES),
)


@st.composite
def files(draw: st.DrawFn) -> str:
    """A config file with tables, inline tables, dotted keys and comments, as people write them."""
    lines = ["# The lab's scheduler", "[limit]", "max_jobs = 5  # a week", ""]
    for section in ("account", "queue"):
        names = draw(st.lists(NAMES, unique=True, max_size=3))
        forms = [draw(st.sampled_from(["table", "table", "table", "dotted", "inline"])) for _ in names]
        plain = [(name, form) for name, form in zip(names, forms, strict=True) if form != "table"]
        if plain:
            lines.append(f"[{section}]")
        for name, form in plain:
            keys = draw(st.lists(KEYS, unique=True, min_size=1, max_size=3))
            pairs = [(key, written(draw(VALUES))) for key in keys]
            shown = written(name) if not name.isascii() or not name.isalpha() else name
            if form == "dotted":
                lines += [f"{shown}.{key} = {value}  # {key}" for key, value in pairs]
            else:
                lines.append(f"{shown} = {{{', '.join(f'{key} = {value}' for key, value in pairs)}}} # so")
        for name, form in zip(names, forms, strict=True):
            if form != "table":
                continue
            shown = written(name) if not name.isascii() or not name.isalpha() else name
            lines += ["", f"# about {section} {name}", f"[{section}.{shown}]   # one"]
            for key in draw(st.lists(KEYS, unique=True, max_size=3)):
                value = draw(VALUES)
                if isinstance(value, list) and draw(st.booleans()):
                    lines += [f"  {key} = [", *(f"    {written(one)},  # {one}" for one in value), "  ]"]
                else:
                    lines.append(f"  {key} = {written(value)}  # {key} of {name}")
    end = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    return end.join(lines) + draw(st.sampled_from([end, "", f"{end}# the end"]))


def _kept(text: str, change: KeyChange, old: dict[str, Any]) -> Counter[str]:
    """Lines of the text that have nothing to do with the change."""
    section, name, *_ = change.key
    owned = (name, *old.get(section, {}).get(name, {}))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(f"[{section}")]
    return Counter(line for line in lines if not any(word in line for word in (*owned, *change.key[2:], "]", '"')))


@given(files(), st.lists(CHANGES, min_size=1, max_size=5))
def test_changes_are_read_back_and_other_lines_stay(text: str, changes: list[KeyChange]) -> None:
    wanted: dict[str, Any] = tomllib.loads(text)
    for change in changes:
        before, old = text, wanted
        if not isinstance(old.get(change.key[0], {}).get(change.key[1], {}), dict):
            continue
        text = with_changes(text, [change])
        wanted = changed(wanted, change)
        assert sections(tomllib.loads(text)) == sections(wanted)
        if old == wanted:
            assert text == before or change.value is not None
        lost = _kept(before, change, old) - Counter(text.splitlines())
        assert not lost, (change, lost)
        if "\r\n" in before:
            assert text.count("\r\n") == text.count("\n")


@given(files(), SECTIONS, NAMES, KEYS, VALUES)
def test_change_taken_back_leaves_the_file_as_it_was(text, section, name, key, value) -> None:
    old = tomllib.loads(text).get(section, {}).get(name)
    if old is None or key in old or not text.endswith("\n"):
        return
    path = (section, name, key)
    assert with_changes(text, [KeyChange(path, value), KeyChange(path, None)]) == text


CASES = [
    # tomlkit 0.15 itself would write [a.new] above z, and so move z into it.
    ("a.b=1\nz=2\n", KeyChange(("a", "new"), {}), "a.b=1\na.new = {}\nz=2\n"),
    ("", KeyChange(("account", "vision"), {"shares": 4}), "[account.vision]\nshares = 4\n"),
    (
        "[account.a]\nshares = 1\n\n# the rest\n[limit]\nx = 1\n",
        KeyChange(("account", "b"), {"parent": "a"}),
        '[account.a]\nshares = 1\n\n[account.b]\nparent = "a"\n\n# the rest\n[limit]\nx = 1\n',
    ),
    ("[account.a]\nshares = 1 # one\n", KeyChange(("account", "a", "shares"), 2), "[account.a]\nshares = 2 # one\n"),
    (
        "[account.a]\n  shares = 1 # one",
        KeyChange(("account", "a", "parent"), "b"),
        '[account.a]\n  shares = 1 # one\n  parent = "b"\n',
    ),
    (
        "# top\n\n# about a\n[account.a]\nshares = 1\n# tail\n\n# about b\n[account.b]\n",
        KeyChange(("account", "a"), None),
        "# top\n# tail\n\n# about b\n[account.b]\n",
    ),
    (
        '[account.a]\nusers = [\n  "ann", # she\n  "bob",\n]\n',
        KeyChange(("account", "a", "users"), ["ann", "carl"]),
        '[account.a]\nusers = [\n  "ann", # she\n  "carl",\n]\n',
    ),
    (
        "[account.a.users]\nann = 1 # she\nbob = 2\n",
        KeyChange(("account", "a", "users"), {"ann": 1, "carl": 3}),
        "[account.a.users]\nann = 1 # she\ncarl = 3\n",
    ),
    # tomlkit itself counts comments above a header to the table before.
    (
        "[account.a]\nshares = 1\n\n# about b\n[account.b]\n",
        KeyChange(("account", "a", "parent"), "b"),
        '[account.a]\nshares = 1\nparent = "b"\n\n# about b\n[account.b]\n',
    ),
    (
        "[account.a]\nshares = 1\n[limit]\nx = 1\n[account.b]\nshares = 2 # two\n",
        KeyChange(("account", "b", "shares"), 3),
        "[account.a]\nshares = 1\n[limit]\nx = 1\n[account.b]\nshares = 3 # two\n",
    ),
    (
        "account.a.shares = 1 # one\nz = 2\naccount.b.shares = 1\naccount.a.parent = 'b'\n",
        KeyChange(("account", "a"), {"shares": 2}),
        "account.a.shares = 2 # one\nz = 2\naccount.b.shares = 1\n",
    ),
    ("account = {a = {shares = 1}}\n", KeyChange(("account", "b"), {}), "account = {a = { shares = 1 }, b = {}}\n"),
    ("[account]\na.shares = 1\n", KeyChange(("account", "a", "shares"), None), "[account]\n\n[account.a]\n"),
]


@pytest.mark.parametrize(("text", "change", "wanted"), CASES)
def test_change_is_written_where_a_person_would(text: str, change: KeyChange, wanted: str) -> None:
    assert with_changes(text, [change]) == wanted


def test_result_that_reads_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "_edited", lambda text, change: f"{text}\n[account.b]\n")
    with pytest.raises(Refused, match="account.a is written in a form that cannot be changed by command"):
        with_changes("[limit]\n", [KeyChange(("account", "a"), {})])
