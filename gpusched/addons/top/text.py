"""Pieces of gtop's frames: text of others made safe, spans and instants, bars, lines of a width. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gpusched.cli.tables import cells

Piece = tuple[str, str]
Line = list[Piece]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_KINDS = {"Zs": " ", "Zl": " ", "Zp": " "}


def clean(text: object, width: int | None = None) -> str:
    """Text of others on one line: control characters, writing directions and zero-width signs are dropped."""
    found = str(text)
    if not (found.isascii() and found.isprintable()):
        found = "".join(map(_visible, found))
    if width is None or cells(found) <= width:
        return found
    kept, room = [], width - 1
    for char in found:
        room -= cells(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept) + "+" if width > 0 else ""


def _visible(char: str) -> str:
    if char in "\t\n\r":
        return " "
    if char.isprintable():
        # Marks without a width could pile up on their neighbours.
        return char if cells(char) else ""
    from unicodedata import category

    return _KINDS.get(category(char), "")


def when(at: float | None, now: float) -> str:
    """`now`, `14:10` of today and within a day from now, else `24 Dec`, in another year `24 Dec 27`."""
    if at is None:
        return ""
    if abs(at - now) < 30:
        return "now"
    local, today = time.localtime(at), time.localtime(now)
    if local[:3] == today[:3] or 0 <= at - now < 86_400:
        return time.strftime("%H:%M", local)
    day = time.strftime("%d %b", local).lstrip("0")
    return day if local[0] == today[0] else f"{day} {local[0] % 100:02d}"


def wrapped(text: str, width: int) -> list[str]:
    """Words on lines of at most this width."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if cells(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        line = clean(word, width)
    return [*lines, line]


def bar(fraction: float | None, width: int, is_ascii: bool, style: str = "good") -> Line:
    """`[####------]`; an unknown value is not zero."""
    if fraction is None:
        return [(f"[{'?' * width}]", "dim")]
    fraction = min(1.0, max(0.0, fraction))
    if is_ascii:
        done = int(fraction * width + 0.5)
        return [("[", "dim"), ("#" * done, style), ("-" * (width - done), "dim"), ("]", "dim")]
    eighths = int(fraction * width * 8 + 0.5)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return [("[", "dim"), (text, style), (" " * (width - len(text)), "dim"), ("]", "dim")]


def plain(lines: Iterable[Line]) -> str:
    """Lines as text, as tests compare them."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines) + "\n"


def sized(lines: list[Line], height: int) -> list[Line]:
    return [*lines[:height], *blank(height - len(lines))]


def blank(lines: int) -> list[Line]:
    return [[] for _ in range(max(0, lines))]


def width_of(line: Line) -> int:
    return sum(cells(text) for text, _ in line)


def filled(line: Line, width: int, style: str = "") -> Line:
    """The line cut to a width, and filled up with blanks."""
    found: Line = []
    left = width
    for text, of_text in line:
        shown = text if cells(text) <= left else clean(text, left)
        found.append((shown, of_text))
        left -= cells(shown)
        if left <= 0:
            return found
    return [*found, (" " * left, style)]


def both_ends(left: Line, right: Line, width: int) -> Line:
    """Two texts at both ends of a line; the left one is cut."""
    room = width - width_of(right)
    return [*filled(left, max(0, room - 1)), (" ", ""), *right] if room > 1 else filled(right, width)
