"""How Slurm's commands lay out rows: `-o '%.8i %j'`, `-O jobid:10,name`, and the columns of sacct."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    Row = Any
    Cell = Callable[[Row], str]

DEFAULT_WIDTH = 20
"""Of a `-O` field without a width."""
MAX_WIDTH = 100_000


class PrintField:
    """One field that a format may name.

    Args: title: its header. cell: the text for a row. keys: the JSON keys that the cell reads, separated by blanks.
    """

    __slots__ = ("cell", "keys", "title")

    def __init__(self, title: str, cell: Cell, keys: str = "") -> None:
        self.title = title
        self.cell = cell
        self.keys = keys


class Piece:
    """A part of a format: a field with its width, or literal text."""

    __slots__ = ("field", "is_right", "suffix", "text", "width")

    def __init__(
        self, field: PrintField | None, text: str = "", width: int = 0, is_right: bool = False, suffix: str = ""
    ) -> None:
        self.field = field
        self.text = text
        self.width = width
        """Columns to cut and pad to; 0: as long as the value."""
        self.is_right = is_right
        self.suffix = suffix
        """Printed after the value."""

    def shape(self, text: str) -> str:
        """Cut and pad a value."""
        if self.width:
            text = text[: self.width]
            text = text.rjust(self.width) if self.is_right else text.ljust(self.width)
        return text + self.suffix


def percent_pieces(form: str, fields: Mapping[str, PrintField]) -> list[Piece]:
    """Split a `%` format: `%i`, `%8i` (left-aligned), `%.8i` (right-aligned), cut to the width.

    All else is literal, an unknown letter after its `%` as well. Raises: ValueError with the specifier for a width
    that is no number, as in `%-8i`.
    """
    pieces: list[Piece] = []
    literal = ""
    at = 0
    while at < len(form):
        if form[at] != "%":
            literal += form[at]
            at += 1
            continue
        end = at + 1
        is_right = form[end : end + 1] == "."
        end += is_right
        digits = end
        while "0" <= form[end : end + 1] <= "9":
            end += 1
        letter = form[end : end + 1]
        if letter == "-":
            while "0" <= form[end + 1 : end + 2] <= "9":
                end += 1
            raise ValueError(form[at : end + 2])
        if letter not in fields or not letter:
            literal += form[at : end + 1]
            at = end + 1
            continue
        if literal:
            pieces.append(Piece(None, literal))
            literal = ""
        width = min(int(form[digits:end][:6] or 0), MAX_WIDTH)
        # A suffix directly behind a field is literal text like any other.
        pieces.append(Piece(fields[letter], width=width, is_right=is_right))
        at = end + 1
    if literal:
        pieces.append(Piece(None, literal))
    return pieces


def long_pieces(form: str, fields: Mapping[str, PrintField]) -> tuple[list[Piece], list[str]]:
    """Split a `-O` list: `jobid`, `name:30` (cut and padded), `name:.30` (right-aligned), `name:TEXT` (a suffix).

    Args: fields: by lower-case name. Returns: the pieces, and the names that are unknown.
    """
    pieces: list[Piece] = []
    unknown: list[str] = []
    for word in form.split(","):
        name, colon, rest = word.partition(":")
        field = fields.get(name.strip().lower().replace("_", "-")) or fields.get(name.strip().lower())
        if field is None:
            unknown.append(name)
            continue
        digits = rest.removeprefix(".")
        if not colon:
            pieces.append(Piece(field, width=DEFAULT_WIDTH))
        elif digits.isascii() and digits.isdigit():
            width = min(int(digits[:6]), MAX_WIDTH)
            pieces.append(Piece(field, width=width or DEFAULT_WIDTH, is_right=rest[:1] == "."))
        else:
            pieces.append(Piece(field, suffix=rest))
    return pieces, unknown


def keys_of(pieces: Iterable[Piece]) -> list[str]:
    """JSON keys that the fields of a format read, each once."""
    found = (key for piece in pieces if piece.field is not None for key in piece.field.keys.split())
    return list(dict.fromkeys(found))


def render(pieces: Sequence[Piece], rows: Iterable[Row], header: bool = True) -> str:
    """One line per row, after one of titles."""
    lines: list[str] = []
    if header:
        lines.append("".join(piece.text if piece.field is None else piece.shape(piece.field.title) for piece in pieces))
    lines.extend(
        "".join(piece.text if piece.field is None else piece.shape(piece.field.cell(row)) for piece in pieces)
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


class AccountingColumn:
    """A column of sacct and its kin: name, width (below 0: left-aligned), and the text for a row."""

    __slots__ = ("cell", "name", "width")

    def __init__(self, name: str, width: int, cell: Cell) -> None:
        self.name = name
        self.width = width
        self.cell = cell

    def sized(self, width: int) -> AccountingColumn:
        """The column at another width."""
        return AccountingColumn(self.name, width, self.cell)


def render_columns(columns: Sequence[AccountingColumn], rows: Iterable[Row], header: bool = True) -> str:
    """Columns of fixed width, each followed by a blank; a text that is too long ends in `+`."""
    lines: list[str] = []
    if header:
        lines.append("".join(_fixed(column.name, column.width) + " " for column in columns))
        lines.append("".join("-" * abs(column.width) + " " for column in columns))
    lines.extend("".join(_fixed(column.cell(row), column.width) + " " for column in columns) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _fixed(text: str, width: int) -> str:
    most = abs(width)
    if len(text) > most:
        text = text[: most - 1] + "+"
    return text.ljust(most) if width < 0 else text.rjust(most)


def render_parsable(
    columns: Sequence[AccountingColumn],
    rows: Iterable[Row],
    delimiter: str = "|",
    *,
    ends_with_delimiter: bool = False,
    header: bool = True,
) -> str:
    """Values joined by the delimiter, never cut: `-P`, or `-p` with one more at the end of each line."""
    end = delimiter + "\n" if ends_with_delimiter else "\n"
    lines = [delimiter.join(column.name for column in columns)] if header else []
    lines.extend(delimiter.join(column.cell(row) for column in columns) for row in rows)
    return "".join(line + end for line in lines)
