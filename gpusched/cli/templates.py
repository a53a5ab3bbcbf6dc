"""Templates of `gsub`: named sets of options of the site and of the user, in files of #GSUB lines.

The site's are in /etc/gpusched/templates, the user's in the folder of their own configuration. One of the user's hides
one of the site's with the same name.
"""

from __future__ import annotations

import sys

from gpusched import paths
from gpusched.cli import output
from gpusched.cli.saved_options import Template, templates
from gpusched.cli.submission import directives, over
from gpusched.errors import Refused, UsageError
from gpusched.model.units import closest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import OptionTable, Values


def _values(template: Template, table: OptionTable) -> Values:
    """What its options set. Raises: UsageError naming each line with a mistake; Refused."""
    content = template.read()
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip() and not line.startswith(b"#"):
            raise UsageError(
                f"{printable(template.path)}, line {number}: a template holds only #GSUB lines and comments",
                "write it as: #GSUB -g 1 -t 4h",
            )
    return directives(table, content, template.path)


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
        found = _values(known[name], table)
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
