"""Saved views of `gq`: filters, columns and order under a name, in a file of the user's own configuration.

The file has a line for each, `NAME = OPTIONS`, and may be edited.
"""

from __future__ import annotations

import os
import shlex
import sys

from gpusched import paths
from gpusched.cli import output
from gpusched.cli.parse import UsageErrors, parse, split_words
from gpusched.cli.saved_options import saved_views
from gpusched.errors import Refused, UsageError
from gpusched.model.units import closest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.cli.parse import OptionTable, Values

_OWN = frozenset({"save", "view", "views", "remove_view", "help", "version", "completion"})
"""What is about views, and never in one."""


def applied(table: OptionTable, values: Values, operands: list[str]) -> tuple[Values, list[str]]:
    """The values over those of the view that they name. Raises: UsageError, Refused."""
    name = values["view"]
    known = saved_views()
    if name not in known:
        near = closest(name, known)
        hint = f"did you mean {near}? " if near else ""
        hint += "list them with: gq --views" if known else "save one: gq --me -s PD --save mine"
        raise UsageError(f"there is no view {printable(name, 40)!r}", hint)
    mistakes = UsageErrors()
    found: Values = {}
    own: list[str] = []
    try:
        found, own, _ = parse(table, split_words(known[name]), operands_first=True)
    except (UsageError, ValueError) as error:
        mistake = error if isinstance(error, UsageError) else UsageError(str(error), "see: gq --help")
        mistakes.add(
            mistake, f"the view {name}: ", f"change {printable(paths.views_file())}, or: gq --remove-view {name}"
        )
    mistakes.check()
    return {**{key: value for key, value in found.items() if key not in _OWN}, **values}, operands or own


def save(table: OptionTable, values: Values, words: Sequence[str]) -> None:
    """Save the options typed beside --save. Raises: UsageError, Refused."""
    name = values["save"]
    if "view" in values:
        raise UsageError("--save and --view were both given", "type the options that the new view is to have")
    if not (name[:1].isalnum() and name.isascii() and all(one.isalnum() or one in "-_." for one in name)):
        raise UsageError(
            f"{printable(name, 40)!r} is not a name for a view", "use letters, digits, dots, dashes, underscores"
        )
    kept = shlex.join(_without_save(table, words))
    if "\n" in kept or "\r" in kept:
        raise UsageError("an option of the view holds a line break", "leave it out")
    known = saved_views()
    _write({**known, name: kept})
    output.note("gq", f"{'changed' if name in known else 'saved'} the view {name}; show it with: gq --view {name}")


def _without_save(table: OptionTable, words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        spelling, equals, _ = word.partition("=")
        if spelling.startswith("--") and len(spelling) > 2 and table.find(spelling).key == "save":
            if not equals:
                next(rest, None)
        else:
            kept.append(word)
    return kept


def remove(name: str) -> int:
    """`gq --remove-view`. Raises: UsageError, Refused."""
    known = saved_views()
    if name not in known:
        raise UsageError(f"there is no view {printable(name, 40)!r}", "list them with: gq --views")
    _write({one: options for one, options in known.items() if one != name})
    output.note("gq", f"removed the view {name}: {printable(known[name])}")
    return 0


def print_list(values: Values) -> int:
    """`gq --views`."""
    known = saved_views()
    views = [{"name": name, "options": options} for name, options in known.items()]
    if not output.show(values, {"views": views}, known):
        sys.stdout.write("".join(f"{printable(name)} = {printable(options)}\n" for name, options in known.items()))
        if not known:
            output.note("gq", "there are no saved views; save one: gq --me -s PD --save mine")
    return 0


def _write(views: dict[str, str]) -> None:
    """Replace the file, whole or not at all. Comments of a hand stay out of it. Raises: Refused."""
    path = paths.views_file()
    draft = f"{path}.{os.getpid()}.new"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            file.write("".join(f"{name} = {options}\n" for name, options in sorted(views.items())))
        os.replace(draft, path)
    except OSError as error:
        raise Refused(
            f"the views in {printable(path)} cannot be written: {error.strerror}",
            f"look at: ls -ld {os.path.dirname(path)}",
        ) from None
