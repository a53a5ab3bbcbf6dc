"""Templates of `gsub`: named sets of options of the site and of the user, in files of #GSUB lines.

The site's are in /etc/gpusched/templates, the user's in the folder of their own configuration. One of the user's hides
one of the site's with the same name.
"""

from __future__ import annotations

import os
import stat
import sys

from gpusched import paths
from gpusched.cli import output
from gpusched.cli.submission import directives, over
from gpusched.errors import Refused, UsageError
from gpusched.model.units import closest, printable
from gpusched.paths import read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values

LIST = "list"
"""In place of a name: show them all."""
MAX_BYTES = 1 << 16


class Template:
    """One file."""

    __slots__ = ("is_of_site", "name", "path")

    def __init__(self, name: str, path: str, is_of_site: bool) -> None:
        self.name = name
        self.path = path
        self.is_of_site = is_of_site

    @property
    def source(self) -> str:
        """Whose it is, in a word."""
        return "site" if self.is_of_site else "user"

    def read(self) -> bytes:
        """The content. Raises: Refused when it cannot be read, or is the site's and others than root can write it."""
        shown = printable(self.path)
        try:
            with open(self.path, "rb") as file:
                if self.is_of_site:
                    for what, found in ((os.path.dirname(self.path), None), (self.path, os.fstat(file.fileno()))):
                        _check_trusted(what, found or os.stat(what))
                return read_at_most(file, MAX_BYTES, f"the template {shown}", "a template holds #GSUB lines")
        except OSError as error:
            raise Refused(f"the template {shown} cannot be read: {error.strerror}", f"look at: ls -l {shown}") from None

    def values(self, table: OptionTable) -> Values:
        """What its options set. Raises: UsageError naming each line with a mistake; Refused."""
        content = self.read()
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip() and not line.startswith(b"#"):
                raise UsageError(
                    f"{printable(self.path)}, line {number}: a template holds only #GSUB lines and comments",
                    "write it as: #GSUB -g 1 -t 4h",
                )
        return directives(table, content, self.path)

    def describe(self) -> tuple[str, str]:
        """Its options, and its first comment."""
        about, options = "", []
        for line in self.read().decode("utf-8", "replace").split("\n"):
            if line.startswith("#GSUB "):
                options.append(line[6:].strip())
            elif line.startswith("#") and not line.startswith("#!") and not about:
                about = line.strip("# \t\r")
        return " ".join(options), about


def _check_trusted(path: str, found: os.stat_result) -> None:
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        shown = printable(path)
        raise Refused(
            f"{shown} can be written by others than root, and is not used as a template of the site",
            f"sudo chown root {shown} && sudo chmod go-w {shown}",
        )


def templates() -> dict[str, Template]:
    """All templates by name; a user's own hides one of the site."""
    found = {}
    for folder, is_of_site in ((paths.site_templates(), True), (paths.own_templates(), False)):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if _is_name(name) and os.path.isfile(f"{folder}/{name}"):
                found[name] = Template(name, f"{folder}/{name}", is_of_site)
    return found


def _is_name(text: str) -> bool:
    """Whether it names a template: editors' copies do not."""
    return text[:1].isalnum() and text != LIST and all(one.isalnum() or one in "-_." for one in text) and text.isascii()


def filled(table: OptionTable, values: Values) -> Values:
    """The values over those of the templates that they name; of several templates later ones take precedence.

    Raises: UsageError, Refused.
    """
    names = values.get("template")
    if not names:
        return values
    lower: Values = {}
    known: dict[str, Template] | None = None
    for name in names:
        known = templates() if known is None else known
        if name not in known:
            raise UsageError(f"there is no template {printable(name, 40)!r}", _hint(name, known))
        found = known[name].values(table)
        if "template" in found:
            raise UsageError(
                f"the template {name} names another one, {', '.join(found['template'])}", "name both: --template A,B"
            )
        lower = over(lower, found)
    return over(lower, values)


def _hint(name: str, known: dict[str, Template]) -> str:
    near = closest(name, known)
    if near is not None:
        return f"did you mean {near}? list them with: gsub --template list"
    return "list them with: gsub --template list" if known else f"make one: {printable(paths.own_templates())}/NAME"


def print_list(values: Values) -> int:
    """`gsub --template list`."""
    rows: list[dict[str, Any]] = []
    for one in templates().values():
        try:
            options, about = one.describe()
        except Refused as error:
            options, about = "", error.message
        rows.append({"name": one.name, "source": one.source, "path": one.path, "options": options, "about": about})
    if output.show(values, {"templates": rows}, (row["name"] for row in rows)):
        return 0
    if rows:
        from gpusched.cli import tables  # only to show them

        columns = [
            tables.Column("NAME", lambda row: row["name"]),
            tables.Column("FROM", lambda row: row["source"]),
            tables.Column("OPTIONS", lambda row: printable(row["options"], 200)),
            tables.Column("ABOUT", lambda row: printable(row["about"], 200)),
        ]
        sys.stdout.write(tables.listing(columns, rows, header=True))
    else:
        output.note("gsub", f"there are no templates; make one: {printable(paths.own_templates())}/NAME")
    return 0
