"""How Slurm's commands lay out rows: `-o '%.8i %j'`, `-O jobid:10,name`, and the columns of sacct."""

from __future__ import annotations

from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from gpusched.addons.slurm.command import Command, Parsed

    Row = Any
    Cell = Callable[[Row], str]

DEFAULT_WIDTH = 20
"""Of a `-O` field without a width."""
MAX_WIDTH = 100_000


class PrintField:
    """One field that a format may name.

    Args:
        title: its header.
        cell: the text for a row.
        keys: the JSON keys that the cell reads, separated by blanks.
        is_whole: a right-aligned value is not cut, as lists of nodes and durations.
    """

    __slots__ = ("cell", "is_whole", "keys", "title")

    def __init__(self, title: str, cell: Cell, keys: str = "", is_whole: bool = False) -> None:
        self.title = title
        self.cell = cell
        self.keys = keys
        self.is_whole = is_whole


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

    def template(self, is_title: bool = False) -> str:
        """The piece in the language of `%`: literal text, or a place for one value."""
        if self.field is None:
            return self.text.replace("%", "%%")
        suffix = self.suffix.replace("%", "%%")
        if not self.width:
            return f"%s{suffix}"
        cut = "" if self.is_right and self.field.is_whole and not is_title else f".{self.width}"
        return f"%{'' if self.is_right else '-'}{self.width}{cut}s{suffix}"


def split_spelling(text: str) -> tuple[str, list[str]]:
    """The letter of `-o`, empty without one, and the names of `-O` in `-a account`, by which a field is declared."""
    words = text.split()
    letter = words.pop(0)[1] if words[0].startswith("-") else ""
    return letter, words


def percent_pieces(form: str, fields: Mapping[str, PrintField], unknown: list[str] | None = None) -> list[Piece]:
    """Split a `%` format: `%i`, `%8i` (left-aligned), `%.8i` (right-aligned), cut to the width.

    All else is literal, an unknown letter after its `%` as well. Args: unknown: receives those letters, `-` for a width
    that is no number, as in `%-8i`. Raises: ValueError with the specifier for such a width if there is no such list.
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
            if unknown is None:
                raise ValueError(form[at : end + 2])
            unknown.append(letter)
            literal += form[at : end + 2]
            at = end + 2
            continue
        if letter not in fields or not letter:
            if unknown is not None and letter not in ("", "%"):
                unknown.append(letter)
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

    A suffix may follow a width, as in `name:30|`; width 0 is none. Args: fields: by lower-case name. Returns: the
    pieces, and the names that are unknown.
    """
    pieces: list[Piece] = []
    unknown: list[str] = []
    for word in form.split(","):
        name, colon, rest = word.partition(":")
        field = fields.get(name.strip().lower().replace("_", "-")) or fields.get(name.strip().lower())
        if field is None:
            if word:
                unknown.append(name)
            continue
        if not colon:
            pieces.append(Piece(field, width=DEFAULT_WIDTH))
            continue
        is_right = rest[:1] == "."
        end = start = int(is_right)
        while "0" <= rest[end : end + 1] <= "9":
            end += 1
        width = min(int(rest[start:end][:6] or 0), MAX_WIDTH)
        suffix = rest[end:] if end > start else rest
        pieces.append(Piece(field, width=width, is_right=is_right and end > start, suffix=suffix))
    return pieces, unknown


def keys_of(pieces: Iterable[Piece]) -> list[str]:
    """JSON keys that the fields of a format read, each once."""
    found = (key for piece in pieces if piece.field is not None for key in piece.field.keys.split())
    return list(dict.fromkeys(found))


def render(pieces: Sequence[Piece], rows: Iterable[Row], header: bool = True) -> str:
    """One line per row, after one of titles."""
    lines: list[str] = []
    fields = [piece.field for piece in pieces if piece.field is not None]
    if header:
        titles = "".join(piece.template(is_title=True) for piece in pieces) + "\n"
        lines.append(titles % tuple(field.title for field in fields))
    template = "".join(piece.template() for piece in pieces) + "\n"
    cells = [field.cell for field in fields]
    own_cells: list[tuple[int, Cell]] | None = None
    # One formatting for each row: a queue has thousands of rows.
    for row in rows:
        alike = getattr(row, "alike", None)
        if alike is None:
            lines.append(template % tuple([cell(row) for cell in cells]))
            continue
        if own_cells is None:
            own_cells = [
                (at, field.cell) for at, field in enumerate(fields) if not set(alike.own).isdisjoint(field.keys.split())
            ]
        texts = alike.known.get(render)
        if texts is None:
            texts = alike.known[render] = [cell(row) for cell in cells]
        for at, cell in own_cells:
            texts[at] = cell(row)
        lines.append(template % tuple(texts))
    return "".join(lines)


class AccountingColumn(PrintField):
    """A column of sacct and its kin, by its name and `%WIDTH`.

    Args:
        width: below 0: left-aligned.
        keys: JSON keys that it reads besides the ones of every record, separated by blanks.
        is_measured: it reads what was measured of runs.
    """

    __slots__ = ("is_measured", "width")

    def __init__(self, name: str, width: int, cell: Cell, keys: str = "", *, is_measured: bool = False) -> None:
        super().__init__(name, cell, keys)
        self.width = width
        self.is_measured = is_measured

    def sized(self, width: int) -> AccountingColumn:
        """The column at another width."""
        return AccountingColumn(self.title, width, self.cell, self.keys, is_measured=self.is_measured)


def choose_columns(
    command: Command, form: str, columns: Iterable[AccountingColumn], unknown: str = 'Invalid field requested: "{}"'
) -> list[AccountingColumn]:
    """The columns of a format, `jobid,state%20,nodelist%-256`; a name may be cut short.

    Args: columns: there are; unknown: Slurm's sentence on a name that is not among them. Raises: CommandError.
    """
    known = {column.title.lower().replace(" ", ""): column for column in columns}
    if form.strip().lower() == "all":
        form = ",".join(known)
    chosen = []
    for word in filter(None, map(str.strip, form.split(","))):
        name, percent, digits = word.partition("%")
        key = name.strip().lower()
        # As Slurm: the first that begins so.
        found = known.get(key) or next((one for title, one in known.items() if key and title.startswith(key)), None)
        if found is None:
            raise command.error(unknown.format(printable(name, 80)))
        if percent:
            number = digits.removeprefix("-")
            if not is_digits(number):
                raise command.error(f'Invalid width of field "{printable(word, 80)}"')
            width = min(int(number[:7]), MAX_WIDTH)
            found = found.sized(-width if digits[:1] == "-" else width) if width else found
        chosen.append(found)
    if not chosen:
        raise command.error(unknown.format(printable(form, 80)))
    return chosen


def helpformat(columns: Iterable[AccountingColumn]) -> str:
    """Names of columns, four on a line."""
    names = [column.title for column in columns]
    lines = [" ".join(f"{name:19}" for name in names[at : at + 4]) for at in range(0, len(names), 4)]
    return "".join(line + "\n" for line in lines)


def render_columns(columns: Sequence[AccountingColumn], rows: Iterable[Row], header: bool = True) -> str:
    """Columns of fixed width, each followed by a blank; a text that is too long ends in `+`."""
    lines: list[str] = []
    if header:
        lines.append("".join(_fixed(column.title, column.width) + " " for column in columns))
        lines.append("".join("-" * abs(column.width) + " " for column in columns))
    lines.extend("".join(_fixed(column.cell(row), column.width) + " " for column in columns) for row in rows)
    return "".join(f"{line}\n" for line in lines)


def render_table(typed: Parsed, columns: Sequence[AccountingColumn], rows: Iterable[Row], delimiter: str = "|") -> str:
    """The table that --parsable, --parsable2 (the last of them counts) and --noheader ask for."""
    forms = [name for name, _ in typed.options if name in ("parsable", "parsable2")]
    header = not typed.has("noheader")
    if not forms:
        return render_columns(columns, rows, header)
    return render_parsable(columns, rows, delimiter, ends_with_delimiter=forms[-1] == "parsable", header=header)


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
    lines = [delimiter.join(column.title for column in columns)] if header else []
    lines.extend(delimiter.join(column.cell(row) for column in columns) for row in rows)
    return "".join(line + end for line in lines)
