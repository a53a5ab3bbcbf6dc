"""A user's notify.toml: what it says, and what is said of what is wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.addons.notify.attempt import without_secrets
from gpusched.addons.notify.targets import (
    TargetsError,
    default_texts,
    fill,
    is_open_to_others,
    problem_of,
    read_targets,
)
from gpusched.model.alert_events import ADMIN_EVENTS, EVENTS, FACTS, OWNER_EVENTS

GOOD = """\
mail = "mailto://smtp.lab.example?from=gpu@lab.example"

[target.phone]
url = "ntfy://alice"
on = ["fail", "TIME-LIMIT-80"]

[target.group]
url = "slack://a/b/c"
title = "{name}!"

[template]
body = "{message}"

[template.end]
title = "{job} is over"
"""


def write(folder: Path, text: str) -> str:
    file = folder / "notify.toml"
    file.write_text(text)
    return str(file)


def test_targets_events_and_words_are_read(tmp_path: Path) -> None:
    found = read_targets(write(tmp_path, GOOD))
    phone, group = found.targets["phone"], found.targets["group"]
    assert phone.takes(("fail", "end"))
    assert not phone.takes(("end",))
    assert group.takes(("end",))
    assert found.words_for(phone, "end") == ("{job} is over", "{message}")
    assert found.words_for(group, "end") == ("{name}!", "{message}")
    assert found.words_for(phone, "fail") == (default_texts("fail")[0], "{message}")


def test_an_address_goes_to_the_mail_server_unless_a_target_has_its_name(tmp_path: Path) -> None:
    found = read_targets(write(tmp_path, GOOD))
    target = found.named("bob+x@lab.example")
    assert target is not None
    assert target.url == "mailto://smtp.lab.example?from=gpu@lab.example&to=bob%2Bx@lab.example"
    assert found.named("nobody") is None
    assert read_targets(write(tmp_path, "[target.x]\nurl='ntfy://a'")).named("bob@lab.example") is None


def test_a_missing_file_has_no_targets(tmp_path: Path) -> None:
    found = read_targets(str(tmp_path / "none"))
    assert not found.exists
    assert not found.targets


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[target.x]\nurl = 'ntfy://a'\ntitle = '{nmae}'", 3, "uses {nmae}, which is not a fact; did you mean {name}?"),
        ("[template.fail]\nbody = '{zzz}'", 2, "known are: event, message"),
        ("[template]\nbody = '{name'", 2, "has an unmatched brace"),
        ("[template]\nbody = '{name!r}'", 2, "formats {name}"),
        ("[template]\nbody = '{exit_code:>5}'", 2, "formats {exit_code}"),
        ("[template]\nbody = '{name.__class__}'", 2, "uses {name.__class__}, which is not a fact"),
        ("[template]\nbody = '{0}'", 2, "uses {0}, which is not a fact"),
        ("[template]\nbody = 3", 2, "must be a string"),
        ("[template.ends]\nbody = 'x'", 1, "has no ends; did you mean end?"),
        ("[template.end]\nbdy = 'x'", 2, "[template.end] has no bdy; did you mean body?"),
        ("[target.x]\nurl = 'ntfy://a'\non = ['ends']", 3, "'ends' is not an event"),
        ("[target.x]\nurl = 'ntfy://a'\non = 'end'", 3, "must be a list of strings"),
        ("[target.x]\non = ['end']", 1, "target x has no url"),
        ("[target.x]\nurl = 's3cret'", 2, "target.x.url is not an address"),
        ("[target.x]\nurl = ['ntfy://s3cret']", 2, "target.x.url is not an address"),
        ("[target.x]\nurl = 'ntfy://a'\ncolour = 1", 3, "has no colour"),
        ("[target.'a b']\nurl = 'ntfy://a'", 1, "is not a valid target name"),
        ("target = 3", 1, "target is a section"),
        ("[target]\nx = 3", 2, "target.x is a table"),
        ("mail = 'smtp.lab'", 1, "mail is not an address"),
        ("mail = 'smtp://h?form=a@b.c'", 1, "mail has no option 'form'; known are: from, to"),
        ("[target.x]\nurl = 'smtps://me@h?to=a@b.c'", 2, "target.x.url has a user without a password"),
        ("[target.x]\nurl = 'smtp://h:0?to=a@b.c'", 2, "target.x.url names no mail server"),
        ("[tragets.x]\nurl = 'ntfy://a'", 1, "it has no tragets; did you mean target?"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(TargetsError) as raised:
        read_targets(file)
    (problem,) = raised.value.problems
    assert problem.message.startswith(f"file {file}, line {line}: ")
    assert says in problem.message
    assert "s3cret" not in problem.message


def test_all_mistakes_are_reported_in_file_order(tmp_path: Path) -> None:
    with pytest.raises(TargetsError, match="and 1 more") as raised:
        read_targets(write(tmp_path, "[template]\nbody='{x}'\ntitle='{y}'"))
    assert ["line 2" in problem.message for problem in raised.value.problems] == [True, False]


def test_an_unreadable_file_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TargetsError, match="is not valid TOML"):
        read_targets(write(tmp_path, "[target"))
    with pytest.raises(TargetsError, match="cannot be read: is a directory"):
        read_targets(str(tmp_path))


def test_a_file_readable_by_others_is_noticed(tmp_path: Path) -> None:
    file = Path(write(tmp_path, GOOD))
    file.chmod(0o640)
    assert is_open_to_others(str(file))
    file.chmod(0o600)
    assert not is_open_to_others(str(file))


@pytest.mark.parametrize("event", [*EVENTS, *OWNER_EVENTS, *ADMIN_EVENTS, "test"])
def test_built_in_templates_use_facts_only(event: str) -> None:
    for text in default_texts(event):
        assert problem_of(text) is None
        assert "{" not in fill(text, {})


def test_a_template_is_filled_once_and_facts_are_not_expanded() -> None:
    facts = {"name": "{user} $HOME", "at": 0.0}
    assert fill("{name} {{x}} {signal}", facts) == "{user} $HOME {x} -"
    assert fill("{at}", facts).startswith(("1970-01-01", "1969-12-31"))
    assert fill("{name}", {"name": "a\udcff"}) == "a\\udcff"
    assert set(FACTS) >= {"job", "name", "state"}


@pytest.mark.parametrize(
    ("url", "text", "shown"),
    [
        ("json://h.org/s3cret/x", "post to http://h.org/s3cret/x failed", "post to http://h.org/***/x failed"),
        ("slack://TokenA/TokenB/TokenC", "tokena and TOKENB", "*** and ***"),
        ("mailto://me:p4@h.org", "login me with p4 at h.org", "login me with *** at h.org"),
        ("mailto://alice:x@h.org?pass=quer%20y", "alice quer y quer%20y", "*** *** ***"),
        ("ntfy://topic@localhost", "localhost refused", "localhost refused"),
        ("json://[s3cret", "no s3cret", "the address cannot be parsed, so the answer is not shown"),
        ("json://127.0.0.1:80/a", "127.0.0.1 refused", "127.0.0.1 refused"),
    ],
)
def test_secret_parts_of_an_address_are_redacted(url: str, text: str, shown: str) -> None:
    assert without_secrets(text, url) == shown
