"""Tables: columns aligned by display width, and at a terminal no wider than the terminal.

In a pipe nothing is cut, folded or coloured, so that scripts read whole values, one row a line.
"""

from __future__ import annotations

import os
import sys
import time

from gpusched.model.units import format_duration, is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

SENTENCES = ("REASON", "CAUSE", "WHY", "NODE/REASON", "NOTE", "JOBS", "MEANING", "NOTIFIED")
"""Columns of sentences and lists, wrapped at a narrow terminal; others are cut only on request."""
_LEAST_SENTENCE = 20
_LEAST_WORDS = 12
"""Width of such a column where others would otherwise be cut below their minimum width."""

STYLES = {
    "R": "32",
    "PD": "33",
    "CG": "36",
    "S": "35",
    "CD": "32",
    "F": "31",
    "TO": "31",
    "OOM": "31",
    "NF": "31",
    "CA": "2",
    "idle": "32",
    "suspect": "31",
    "lost": "31",
    "drained": "33",
}
"""Escape codes of coloured cells, on terminals with colours."""


def cells(text: str) -> int:
    """Display width of a text: 2 for wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width  # rarely needed

    return sum(
        2
        if east_asian_width(char) in "WF"
        else 0
        # Vowels and finals of Hangul join the syllable before them.
        if category(char) in ("Mn", "Me") or "\u1160" <= char <= "\u11ff"
        else 1
        for char in text
    )


def pad(text: str, width: int, is_right: bool = False) -> str:
    """Pad a text with blanks to this width."""
    blanks = " " * (width - cells(text))
    return blanks + text if is_right else text + blanks


def head(text: str, width: int) -> str:
    """The longest beginning of a text that fits in this width."""
    if text.isascii():
        return text[:width]
    taken = 0
    for at, char in enumerate(text):
        taken += cells(char)
        if taken > width:
            return text[:at]
    return text


def shorten(text: str, width: int) -> str:
    """A text of at most this width; a cut text ends in an ellipsis."""
    return text if cells(text) <= width else head(text, width - 1) + _ellipsis()


def _ellipsis() -> str:
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return "…" if encoding == "utf8" else "+"


def screen() -> tuple[int, int] | None:
    """Lines and columns of the terminal on standard output; None if it is not a terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        found = os.terminal_size((0, 0))
    columns, lines = (
        int(text) if is_digits(text := os.environ.get(name, "")) and int(text) else size
        for name, size in (("COLUMNS", found.columns), ("LINES", found.lines))
    )
    return lines or 24, columns or 80


def is_drawn() -> bool:
    """Whether standard output is a terminal that supports escape codes."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_coloured() -> bool:
    """Whether standard output is such a terminal and the user has not disabled colours."""
    return is_drawn() and not os.environ.get("NO_COLOR")


class Column:
    """One column of a table: its title, the cells, and how it shrinks."""

    __slots__ = ("cell", "is_below", "is_right", "keys", "least", "order", "short", "title")

    def __init__(
        self,
        title: str,
        cell: Callable[[Any], str],
        *,
        right: bool = False,
        least: int | None = None,
        keys: str = "",
        short: Callable[[Any], str] | None = None,
        order: int = 0,
        below: bool = False,
    ) -> None:
        """Args: least: width down to which the column is cut on a narrow terminal; keys: JSON keys that the cell reads,
        for tables that request only these from the daemon; short: a shorter cell for narrow terminals; order: when the
        column is shortened among those with a `short`, or else left out among those without, 1 first; 0: never;
        below: where even that leaves too little room, its cells are on a line below each row; they are never cut."""
        self.title = title
        self.cell = cell
        self.is_right = right
        self.least = least
        self.keys = keys
        self.short = short
        self.order = order
        self.is_below = below


def rows_of(columns: Sequence[Column], rows: Sequence[Any]) -> list[Sequence[str]]:
    """The cells of these rows."""
    return list(zip(*[map(column.cell, rows) for column in columns]))  # noqa: B905  3.10 can, but the keyword costs


def lines_of(
    columns: Sequence[Column], rows: Sequence[Any], header: bool = True, sentence: Callable[[Any], str] | None = None
) -> list[str]:
    """The lines of a table of these rows, at a terminal each row with its sentence, if any, on lines below it.

    Cells and sentences must be printable.
    """
    return lines_of_cells(columns, rows_of(columns, rows), header, rows, sentence)


def lines_of_cells(
    columns: Sequence[Column],
    made: Sequence[Sequence[str]],
    header: bool = True,
    rows: Sequence[Any] = (),
    sentence: Callable[[Any], str] | None = None,
) -> list[str]:
    """The same for cells that are there already; without the rows behind them there are no shorter cells."""
    size = screen()
    if size is None:
        return _lines(columns, made, header)
    below = list(map(sentence, rows)) if sentence is not None else []
    kept, shown = _narrowed(columns, rows, made, size[1])
    if kept is None:
        # The last column says most, and comes first.
        moved = [at for at, column in reversed([*enumerate(columns)]) if column.is_below]
        texts = ("  ".join(row[at] for at in moved if row[at]) for row in made)
        below = [f"{text} {said}".strip() for text, said in zip(texts, below)] if below else list(texts)  # noqa: B905
        above = [at for at, column in enumerate(columns) if not column.is_below]
        made = [[row[at] for at in above] for row in made]
        kept, shown = _narrowed([columns[at] for at in above], rows, made, size[1])
    lines = _lines(kept or (), shown, header)
    return [*lines[: len(lines) - len(made)], *_interleaved(lines[len(lines) - len(made) :], below)] if below else lines


def _interleaved(lines: Sequence[str], below: Sequence[str]) -> Iterator[str]:
    for line, text in zip(lines, below):  # noqa: B905
        yield line
        if text:
            yield folded(f"    {text}")


def _lines(columns: Sequence[Column], made: Sequence[Sequence[str]], header: bool) -> list[str]:
    return table(
        [column.title for column in columns],
        made,
        frozenset(at for at, column in enumerate(columns) if column.is_right),
        header,
        {
            at: least
            for at, column in enumerate(columns)
            if (least := _NEVER_CUT if column.is_below else column.least) is not None
        },
    )


_NEVER_CUT = sys.maxsize
_WISHED = 20
"""Width of a column that is cut on a narrow terminal, up to which other columns are shortened first."""


def _narrowed(
    columns: Sequence[Column], rows: Sequence[Any], made: Sequence[Sequence[str]], room: int
) -> tuple[Sequence[Column] | None, Sequence[Sequence[str]]]:
    """The columns and cells that a terminal of this width has room for: shorter cells first, then fewer columns.

    No columns if those that may be below must be there.
    """
    parts = [[column.title, *(row[at] for row in made)] for at, column in enumerate(columns)]
    widths = [max(map(cells, part)) for part in parts]
    if sum(widths) + len(columns) - 1 <= room or not any(column.order or column.is_below for column in columns):
        return columns, made
    kept = list(range(len(columns)))

    def is_within(wished: int) -> bool:
        """Whether all columns kept fit if those that may be cut are no wider than this."""
        taken = 0
        for at in kept:
            column = columns[at]
            least = _LEAST_SENTENCE if column.title in SENTENCES and not column.is_below else column.least
            taken += widths[at] if least is None else min(widths[at], max(least, wished, len(column.title)))
        return taken + len(kept) - 1 <= room

    ordered = sorted((at for at in kept if columns[at].order), key=lambda at: columns[at].order)
    for at in ordered:
        short = columns[at].short
        if short is not None and rows and not is_within(_WISHED):
            parts[at][1:] = map(short, rows)
            widths[at] = max(map(cells, parts[at]))
    for at in ordered:
        if columns[at].short is None and not is_within(0):
            kept.remove(at)
    if not is_within(0) and any(columns[at].is_below for at in kept):
        return None, made
    return [columns[at] for at in kept], list(zip(*(parts[at][1:] for at in kept)))  # noqa: B905


def minute(at: float) -> str:
    """`2026-12-24 18:00`, local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def decimals(amount: float | None, unit: float = 1.0) -> str:
    """An amount with two decimals, in a larger unit; `n/a` when unknown."""
    return "n/a" if amount is None else f"{amount / unit:.2f}"


def listing(columns: Sequence[Column], rows: Sequence[Any], header: bool = True) -> str:
    """The table as one text."""
    return "".join(f"{line}\n" for line in lines_of(columns, rows, header))


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int] = frozenset(),
    header: bool = True,
    cut: Mapping[int, int] = {},
) -> None:
    """Print a table, see `table`."""
    sys.stdout.write("".join(f"{line}\n" for line in table(titles, rows, right, header, cut)))


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int] = frozenset(),
    header: bool = True,
    cut: Mapping[int, int] = {},
) -> list[str]:
    """The lines of a table. Texts must be printable.

    Args: right: columns aligned to the right; cut: columns cut with an ellipsis if the terminal is too narrow, with
    their minimum width; each row is then one line. Sentences in other columns are wrapped.
    """
    shown = [titles, *rows] if header else rows
    if not shown:
        return []
    columns = list(zip(*shown))  # noqa: B905  3.10 can, but the keyword costs
    is_ascii = all("".join(column).isascii() for column in columns)
    widths = [max(map(len if is_ascii else cells, column)) for column in columns]
    size, gutter = screen(), 1
    if size is None and is_ascii:
        # One formatting for each row: a queue has thousands of rows.
        places = [f"%{'' if at in right else '-'}{width}s" for at, width in enumerate(widths)]
        template = " ".join(places)
        return [(template % tuple(row)).rstrip() for row in shown]
    if size is not None:
        fitted, gutter = _fit(widths, titles, size[1], cut)
        if fitted != widths:
            shown = [line for row in shown for line in _lines_of(row, fitted, cut)]
            widths = fitted
    last, between, has_colour = len(titles) - 1, " " * gutter, is_coloured()
    lines = []
    for at, row in enumerate(shown):
        padded = [
            cell if column == last and column not in right else pad(cell, widths[column], column in right)
            for column, cell in enumerate(row)
        ]
        is_head = header and at == 0
        if has_colour and not is_head:
            padded = [
                f"\x1b[{STYLES[cell]}m{text}\x1b[0m" if cell in STYLES else text
                for cell, text in zip(row, padded)  # noqa: B905
            ]
        line = between.join(padded).rstrip()
        lines.append(f"\x1b[1m{line}\x1b[0m" if has_colour and is_head else line)
    return lines


def _fit(widths: list[int], titles: Sequence[str], room: int, cut: Mapping[int, int]) -> tuple[list[int], int]:
    """Widths that fit into this room as far as columns can shrink, and the number of blanks between columns."""
    least, between = list(widths), len(titles) - 1
    for at, title in enumerate(titles):
        if at in cut or title in SENTENCES:
            least[at] = min(widths[at], max(len(title), cut.get(at, _LEAST_SENTENCE)))
    gutter = 2 if sum(least) + 2 * between <= room else 1
    room -= gutter * between
    if sum(least) > room:
        least = [
            min(width, _LEAST_WORDS) if title in SENTENCES else width
            for title, width in zip(titles, least)  # noqa: B905
        ]
    if sum(least) > room:
        least = [1 if at in cut else width for at, width in enumerate(least)]
    fitted, cap = widths, room
    while sum(fitted) > room and cap > 0:
        # The widest columns shrink first, down to a common width.
        fitted = [max(low, min(width, cap)) for low, width in zip(least, widths)]  # noqa: B905
        cap -= 1
    return fitted, gutter


def _lines_of(row: Sequence[str], widths: Sequence[int], cut: Mapping[int, int]) -> list[Sequence[str]]:
    """A row in columns of these widths: cut, or wrapped over several lines."""
    parts = [
        [cell] if cells(cell) <= width else [shorten(cell, width)] if at in cut else _wrap(cell, width)
        for at, (cell, width) in enumerate(zip(row, widths))  # noqa: B905
    ]
    return [[part[at] if at < len(part) else "" for part in parts] for at in range(max(map(len, parts)))]


def folded(text: str, indent: int = 4) -> str:
    """A line as several at a narrow terminal, broken between words and indented from the second on.

    A word that is wider stays whole: paths are to be copied.
    """
    size = screen()
    if size is None or cells(text) <= size[1]:
        return text
    begin = len(text) - len(text.lstrip())
    indent = indent if indent < size[1] // 2 else 4
    lines = [text[:begin]]
    for word in text[begin:].split(" "):
        gap = " " if lines[-1].strip() else ""
        if gap and word and cells(lines[-1]) + 1 + cells(word) > size[1]:
            lines.append(" " * indent)
            gap = ""
        lines[-1] += gap + word if word or gap else " "
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str, width: int) -> list[str]:
    """Wrap a sentence into lines of at most this width."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cells(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while cells(word) > width:
            piece = head(word, width) or word[0]
            piece = piece[: piece.rfind(",") + 1] or piece
            lines[-1:] = [piece, ""]
            word = word[len(piece) :]
        lines[-1] = word
    return lines


_DEFAULT = "less"


def page(text: str, is_wanted: bool = True) -> None:
    """Print a text, through the pager if it has more lines than the terminal."""
    size = screen()
    is_long = size is not None and text.count("\n") >= size[0]
    pager = _pager() if is_wanted and is_long and is_drawn() else ""
    if not pager or not _show(pager, text):
        sys.stdout.write(text)


def _pager() -> str:
    """The command line of the pager; empty for none."""
    for name in ("GPUSCHED_PAGER", "PAGER"):
        chosen = os.environ.get(name)
        if chosen is not None:
            return "" if chosen.strip() == "cat" else chosen.strip()
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return _DEFAULT if any(os.access(os.path.join(folder, _DEFAULT), os.X_OK) for folder in folders) else ""


def _show(pager: str, text: str) -> bool:
    """Show a text in the pager; False if it cannot be found."""
    import signal
    import subprocess

    sys.stdout.flush()
    # Raw colours, no pager for short texts, and the last page stays on the screen.
    env = {"LESS": "FRX", "LV": "-c", **os.environ}
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=env)
    # Ctrl-C goes to the pager, which keeps running.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.communicate(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    finally:
        signal.signal(signal.SIGINT, before)
    return process.returncode not in (126, 127)


WIDTH = 10


def bar(fraction: float, eta_at: float | None, now: float) -> str:
    """`[####......]  45% 2:03`: done so far, and the remaining time; `?` if unknown."""
    # Rounded down: full and 100 % only at the end.
    done = int(fraction * WIDTH)
    return f"[{'#' * done}{'.' * (WIDTH - done)}] {percentage(fraction, eta_at, now)}"


def percentage(fraction: float, eta_at: float | None, now: float) -> str:
    """` 45% 2:03`: the end of `bar`."""
    left = "?" if eta_at is None else format_duration(max(0.0, eta_at - now))
    return f"{int(fraction * 100):3d}% {left}"


def sentence(fraction: float, text: str, eta_at: float | None, now: float) -> str:
    """The progress bar of gshow, with the text reported by the job."""
    drawn = bar(fraction, eta_at, now).rpartition(" ")[0]
    said = f", {text}" if text else ""
    if eta_at is None:
        return f"{drawn}{said}"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(eta_at))
    return f"{drawn}{said}; done in about {format_duration(max(0.0, eta_at - now))}, at {at}"
