"""Mentions of jobs and reservations in sentences, which the edge renders for each viewer.

A reason or an event is one sentence for all who read it, but `private_data` may hide from some of them the jobs and
reservations that it mentions. Its author therefore writes `mention_job("12")` in place of "job 12": the phrase between
control characters, after the names that it gives away. Such a text can be composed, stored and sent like any other.
The edge renders it (`render`, `render_json`): the phrase for those who may know all of its names, generic words for
others, whatever the sentence around it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpusched.model.units import NAMED, name_some

START, MIDDLE, END = "\x02", "\x1f", "\x03"
JOB, RESERVATION, UNKNOWN = "j", "r", "?"
"""Kinds of mentions. The last one is a sentence stored before there were mentions, which may name anything."""
_GENERIC = {
    JOB: ("another job", "other jobs"),
    RESERVATION: ("a reservation", "reservations"),
    UNKNOWN: ("(a text from before an upgrade, which may name other users' jobs)",) * 2,
}
# A text may have been cut inside a mention: its rest then counts as part of it.
_MENTION = re.compile(f"{START}([jr?])([^{MIDDLE}{END}]*)(?:{MIDDLE}([^{END}]*))?(?:{END}|\\Z)")
# Each escape sequence is read as a whole, so that a backslash before one does not hide it.
_JSON_MENTION = re.compile(
    rb'\\u0002([jr?])((?:[^"\\]|\\(?!u00(?:1f|03)).)*)(?:\\u001f((?:[^"\\]|\\(?!u0003).)*))?(?:\\u0003|(?="))'
)
_BACKSLASH = ord("\\")
_JSON_START = b"\\u0002"

Knows = Callable[[str, str], bool]
"""Whether a viewer may know the thing of this kind with this name."""


def mention_job(name: str, of: str = "") -> str:
    """`job 12`, or `job 12 of ann`."""
    return mention_jobs([name], of)


def mention_jobs(names: Sequence[str], of: str = "", named: int = NAMED) -> str:
    """`jobs 7, 8, 9 and 4 more`; empty for no names."""
    if not names:
        return ""
    return _mention(JOB, names[:named], name_some("job", names, named) + (f" of {of}" if of else ""))


def mention_reservation(name: str) -> str:
    """`reservation thesis`."""
    return _mention(RESERVATION, [name], f"reservation {name}")


def mentioned_name(kind: str, name: str) -> str:
    """A bare name, as in the facts behind a reason."""
    return _mention(kind, [name], name)


def _mention(kind: str, names: Sequence[str], phrase: str) -> str:
    return f"{START}{kind}{','.join(names)}{MIDDLE}{phrase}{END}"


def render(text: str, knows: Knows | None = None) -> str:
    """A sentence for one viewer; for one who may know everything if `knows` is None."""
    if START not in text:
        return text
    return _MENTION.sub(lambda found: _shown(found[1], found[2], found[3] or "", knows), text)


def has_mentions(document: bytes | bytearray) -> bool:
    """Whether a document in ASCII JSON may need rendering."""
    # A long document mostly has no backslash at all, which takes a fraction of the time to find out.
    return b"\\" in document and _JSON_START in document


def render_value(value: object, knows: Knows | None = None) -> object:
    """The same for a fact behind a reason: a text, or a list or mapping with texts."""
    if isinstance(value, str):
        return render(value, knows)
    if isinstance(value, Mapping):
        return {name: render_value(one, knows) for name, one in value.items()}
    return [render_value(one, knows) for one in value] if isinstance(value, (list, tuple)) else value


def render_json(document: bytes | bytearray, knows: Knows | None = None) -> bytes | bytearray:
    """A document in ASCII JSON with all its texts rendered for one viewer."""

    known: dict[bytes, bytes] = {}
    pieces: list[bytes | bytearray] = []
    done = at = 0
    # Searched for, since a list is megabytes with few mentions.
    while (at := document.find(_JSON_START, at)) >= 0:
        before = at
        while before > done and document[before - 1] == _BACKSLASH:
            before -= 1
        found = None if (at - before) % 2 else _JSON_MENTION.match(document, at)
        if found is None:
            # The second of two backslashes, or a control character of somebody else.
            at += len(_JSON_START)
            continue
        whole = found[0]
        text = known.get(whole)
        if text is None:
            # Kept, since thousands of rows mention the same job.
            text = known[whole] = _shown_json(found, knows)
        pieces += document[done:at], text
        done = at = found.end()
    return b"".join([*pieces, document[done:]]) if pieces else document


def _shown_json(found: re.Match[bytes], knows: Knows | None) -> bytes:
    names = json.loads(b'"%s"' % found[2])
    return _shown(found[1].decode(), names, (found[3] or b"").decode(), knows).encode()


def _shown(kind: str, names: str, phrase: str, knows: Knows | None) -> str:
    listed = names.split(",")
    if knows is None or all(knows(kind, name) for name in listed):
        return phrase
    return _GENERIC[kind][len(listed) > 1]


def is_name(text: str) -> bool:
    """Whether a text is nothing but a mention."""
    found = _MENTION.match(text)
    return found is not None and found.end() == len(text)


def mentions(text: str) -> Iterator[tuple[str, str]]:
    """Kind and name of everything that a text mentions."""
    for found in _MENTION.finditer(text):
        for name in found[2].split(","):
            yield found[1], name
